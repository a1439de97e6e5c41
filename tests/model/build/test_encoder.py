"""Documents of packed rows get the scores that transformers gives each of them alone, for every family of encoders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ModelError
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.model.attention.by_document import BY_DOCUMENT
from ds_finetune.model.build.encoder import check_encoder, encoder_inputs, encoder_of, encoder_scores, max_positions
from ds_finetune.model.build.skeleton import build_skeleton, full_fragment, read_hf_config
from ds_finetune.model.loss.score_config import fresh_parameters
from ds_finetune.model.loss.score_head import head_parameters, initialise_score_head
from ds_finetune.model.weights.load import LoadReport, load_weights
from ds_finetune.objectives.scores import Classification
from tests.model.encoders import ENCODERS, LENGTHS, encoder_config, packed_rows, save_encoder


def _model(name: str, attention: str, **extra: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(encoder_config(name, **extra)).train()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(0.1 * torch.randn(param.shape))
    model.set_attn_implementation(attention)
    return model


def _packed_scores(model: PreTrainedModel) -> torch.Tensor:
    ids, positions, types, examples = packed_rows()
    inputs = encoder_inputs(model.config, positions, types)
    hidden = model.base_model(input_ids=ids, use_cache=False, documents=LENGTHS, sp_group=None, **inputs)
    return encoder_scores(model, hidden.last_hidden_state, examples)


def _scores_alone(model: PreTrainedModel) -> torch.Tensor:
    """What transformers computes from each document without padding."""
    ids, _, types, examples = packed_rows()
    has_types = encoder_of(model.config).has_token_types
    scores = []
    for start, end in zip(examples.starts.tolist(), examples.ends.tolist(), strict=True):
        parts = [part.flatten()[None, start : end + 1] for part in (ids, types)]
        extra = {"token_type_ids": parts[1]} if has_types else {}
        scores.append(model(input_ids=parts[0], attention_mask=torch.ones_like(parts[0]), **extra).logits)
    return torch.cat(scores)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_document_of_a_packed_row_has_the_scores_and_gradients_it_has_alone(name: str, checkpointing: bool) -> None:
    packed, alone = _model(name, BY_DOCUMENT), _model(name, "eager")
    if checkpointing:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
    found, wanted = _packed_scores(packed), _scores_alone(alone)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert wanted.std(dim=0).min() > 0.01, "different documents should have different scores"
    for scores in (found, wanted):
        scores.square().sum().backward()
    gradients = {key: param.grad for key, param in packed.named_parameters()}
    for key, param in alone.named_parameters():
        # The gradient of a key's bias is 0 but for rounding: it adds the same to all logits of a query.
        floor = 1e-6 + 1e-4 * float(param.grad.abs().max())
        assert torch.allclose(gradients[key], param.grad, rtol=1e-3, atol=floor), key


def test_every_encoder_of_the_table_is_compared() -> None:
    kinds = {config["model_type"] for config in ENCODERS.values()}
    assert kinds == {name for name, family in FAMILIES.items() if family.encoder is not None}


def test_a_window_of_modernbert_changes_the_scores() -> None:
    narrow, wide = (_scores_alone(_model("modernbert", "eager", local_attention=width)) for width in (6, 60))
    assert not torch.allclose(narrow, wide, atol=1e-3)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_forward_without_documents_has_zero_gradients_everywhere(name: str) -> None:
    model = _model(name, BY_DOCUMENT)
    ids, positions, types, examples = packed_rows()
    nothing = {key: getattr(examples, key)[:0] for key in ("starts", "ends", "numbers", "targets", "reference")}
    none = type(examples)(index=torch.full_like(ids, -1), **nothing)
    hidden = model.base_model(input_ids=ids, documents=LENGTHS, **encoder_inputs(model.config, positions, types))
    scores = encoder_scores(model, hidden.last_hidden_state, none)
    assert scores.shape == (0, 3)
    scores.sum().backward()
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())


@pytest.mark.parametrize(("name", "most"), [("bert", 40), ("roberta", 40), ("modernbert", 8192)])
def test_documents_may_be_as_long_as_the_model_has_positions(name: str, most: int) -> None:
    assert max_positions(encoder_config(name)) == most


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"objective": "sft"}, "objective sft is not supported for encoders such as model_type `bert`"),
        ({"attention": "eager"}, "model.attention eager is not supported for encoders"),
        ({"is_decoder": True}, "is_decoder true in config.json is not supported for encoders"),
    ],
)
def test_an_encoder_is_not_trained_as_another_model(changed: dict[str, Any], text: str) -> None:
    config = encoder_config("bert", is_decoder=changed.pop("is_decoder", False))
    with pytest.raises(ModelError, match=text):
        check_encoder(config, **{"attention": "sdpa", "objective": "classification", **changed})


def test_dropout_in_training_draws_and_evaluation_does_not() -> None:
    model = _model("bert", BY_DOCUMENT, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    first, second = _packed_scores(model), _packed_scores(model)
    assert not torch.allclose(first, second)
    model.eval()
    assert torch.equal(_packed_scores(model), _packed_scores(model))


def test_recomputed_activations_drop_the_same_numbers() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = _model("bert", BY_DOCUMENT, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(9)
        _packed_scores(model).square().sum().backward()
        gradients.append({key: param.grad for key, param in model.named_parameters()})
    assert all(torch.equal(gradients[0][key], gradients[1][key]) for key in gradients[0])


def _bare_names(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a base model as its own class saves them."""
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def _save(folder: Path, config: PretrainedConfig, tensors: dict[str, torch.Tensor], *, architecture: str) -> None:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")


def _load(name: str, folder: Path) -> tuple[PreTrainedModel, LoadReport]:
    hf_config = read_hf_config(str(folder), task="sequence_classification")
    lm = build_skeleton(hf_config, attention="sdpa", dtype=torch.float32, device="cpu", task="sequence_classification")
    fresh = fresh_parameters(hf_config, "sequence_classification", head_parameters(lm))
    family = family_of(ENCODERS[name]["model_type"])
    report = load_weights(lm, folder, family=family, may_be_missing=fresh)
    initialise_score_head(lm, Classification(3), report.missing, seed=1, where=full_fragment)
    return lm, report


@pytest.mark.parametrize("name", ENCODERS)
def test_a_saved_classifier_is_loaded_whole(name: str, tmp_path: Path) -> None:
    wanted = save_encoder(name, tmp_path).state_dict()
    lm, report = _load(name, tmp_path)
    assert report.missing == ()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in lm.state_dict().items())


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_a_base_model_is_loaded_with_or_without_prefix_and_its_head_is_drawn(name: str, tmp_path: Path) -> None:
    model = _model(name, "eager")
    prefix, state = f"{model.base_model_prefix}.", model.state_dict()
    position_ids = torch.arange(40)[None]
    with_prefix = {key: tensor for key, tensor in state.items() if key.startswith(prefix) and "pooler" not in key}
    unused = {"roberta": {"pooler.dense.weight": torch.ones(32, 32)}, "bert": {"embeddings.position_ids": position_ids}}
    bare = _bare_names(with_prefix, prefix) | unused.get(name, {})
    reports = []
    for number, tensors in enumerate((with_prefix, bare)):
        folder = tmp_path / str(number)
        _save(folder, encoder_config(name), tensors, architecture=type(model.base_model).__name__)
        lm, report = _load(name, folder)
        assert all(torch.equal(lm.state_dict()[key], tensor) for key, tensor in with_prefix.items())
        assert all(torch.isfinite(tensor).all() for tensor in lm.state_dict().values())
        reports.append(report.missing)
    assert reports[0] == reports[1] == tuple(head_parameters(lm))
    matrices = [lm.get_parameter(key) for key in reports[0] if key.endswith("weight") and "norm" not in key]
    assert all(0.01 < matrix.detach().std() < 0.4 for matrix in matrices)


def test_what_a_language_model_head_leaves_over_is_not_loaded_and_norms_may_have_old_names(tmp_path: Path) -> None:
    model = _model("bert", "eager")
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for key, tensor in model.state_dict().items()
        if not key.startswith("classifier.")
    }
    others = {"cls.predictions.bias": torch.zeros(96), "bert.embeddings.position_ids": torch.arange(40)[None]}
    _save(tmp_path, encoder_config("bert"), old | others, architecture="BertForPreTraining")
    lm, report = _load("bert", tmp_path)
    assert report.missing == ("classifier.weight", "classifier.bias")
    assert report.skipped == tuple(sorted(others))
    wanted = model.state_dict()
    assert all(torch.equal(lm.state_dict()[key], wanted[key]) for key in wanted if not key.startswith("classifier."))


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        ("bert.pooler.dense.bias", "1 missing: bert.pooler.dense.bias"),
        ("bert.encoder.layer.1.output.dense.weight", "1 missing: bert.encoder.layer.1.output.dense.weight"),
    ],
)
def test_half_a_head_or_a_lost_layer_is_an_error(lost: str, text: str, tmp_path: Path) -> None:
    model = _model("bert", "eager")
    kept = {key: tensor for key, tensor in model.state_dict().items() if key != lost and "classifier" not in key}
    _save(tmp_path, encoder_config("bert"), kept, architecture="BertModel")
    with pytest.raises(ModelError, match=text):
        _load("bert", tmp_path)
