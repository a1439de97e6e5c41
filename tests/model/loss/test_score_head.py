"""A document is scored at its end, however rows are packed, and a new head is drawn for a base without one."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from ds_finetune.config.objectives import ClassificationObjective, RewardObjective
from ds_finetune.data.batches import BatchPlan, Position, make_batch
from ds_finetune.data.prepared_rows import Row, RowDocuments
from ds_finetune.engine.rank_rows import host_rows
from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.model.build.skeleton import build_skeleton, full_fragment, read_hf_config
from ds_finetune.model.loss.score_config import fresh_parameters, set_classes, set_padding_token, with_base_classes
from ds_finetune.model.loss.score_head import initialise_score_head, install_score_head
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.model.weights.load import initialise_weights, load_weights, seed_of
from ds_finetune.model.weights.vocabulary import Growth
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import ScoreObjective
from ds_finetune.objectives.scores import Classification, Reward
from tests.model.tiny import CONFIGS

LABELS = 3
TASK = "sequence_classification"
PAD = 0


def config_of(family: str, labels: int = LABELS) -> PretrainedConfig:
    return AutoConfig.for_model(family, **CONFIGS[family], num_labels=labels, pad_token_id=PAD)


def texts(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 96, (length,), generator=generator) for length in lengths]


def packed_row(ids: list[torch.Tensor], targets: list[float]) -> Row:
    lengths = np.array([len(each) for each in ids], dtype=np.int64)
    tokens = torch.cat(ids).numpy().astype(np.int32)
    documents = RowDocuments(lengths, np.arange(len(ids)), np.array(targets, dtype=np.float64), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    return Row(tokens, positions, np.full(len(tokens), IGNORE_INDEX, dtype=np.int32), 0, documents)


def model_of(config: PretrainedConfig, objective: ScoreObjective) -> TrainedModel:
    lm = build_skeleton(config, attention="sdpa", dtype=torch.float32, device="cpu", task=TASK)
    initialise_weights(lm, seed=0)
    install_score_head(lm, objective)
    return TrainedModel(lm)


def plain_scores(model: TrainedModel, ids: list[torch.Tensor]) -> torch.Tensor:
    """Scores of texts one by one, by transformers' own class."""
    config = model.config.to_dict() | {"attn_implementation": "eager"}
    other = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config)).eval()
    other.load_state_dict(model.lm.state_dict())
    with torch.no_grad():
        return torch.cat([other(input_ids=each[None]).logits for each in ids])


@pytest.mark.parametrize("row_len", [40, None])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2", "llama"])
def test_loss_is_that_of_transformers_on_single_texts(family: str, row_len: int | None) -> None:
    objective = Classification(LABELS, label_smoothing=0.1)
    model = model_of(config_of(family), objective)
    # The last text ends in the padding token.
    ids, targets = [*texts((5, 1, 9, 4)), torch.tensor([7, 8, 0])], [0.0, 2.0, 1.0, 1.0, 2.0]
    rows = [packed_row(ids[:3], targets[:3]), packed_row(ids[3:], targets[3:])]
    if row_len is None:
        rows = [packed_row([each], [target]) for each, target in zip(ids, targets, strict=True)]
    plan = BatchPlan(len(rows), len(rows), 0, 1, 0, False, PAD, row_len, documents_per_unit=1)
    (micro,) = make_batch(rows, plan, Position(0, 0), ()).micro
    found = model(host_rows(micro, None))
    wanted = plain_scores(model, [*ids[:4], torch.tensor([7, 8, 0])])
    torch.testing.assert_close(found.scores[:4], wanted[:4], atol=1e-5, rtol=0)
    # transformers takes the token before the end of the last text, which is the padding token.
    assert (found.scores[4] - wanted[4]).abs().max() > 1e-3
    classes = torch.tensor(targets).long()
    loss = functional.cross_entropy(found.scores, classes, reduction="sum", label_smoothing=0.1)
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-6)


def test_no_document_gives_zero_and_zero_gradients() -> None:
    model = model_of(config_of("llama"), Classification(LABELS))
    plan = BatchPlan(1, 1, 0, 1, 0, False, PAD, None, documents_per_unit=1)
    (micro,) = make_batch([None], plan, Position(0, 0), ()).micro
    found = model(host_rows(micro, None))
    found.loss.backward()
    assert found.loss.item() == 0
    assert not found.sums.any()
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())


def loaded(folder: Path, objective: ScoreObjective, config: PretrainedConfig, seed: int = 0) -> Any:
    lm = build_skeleton(config, attention="sdpa", dtype=torch.float32, device="cpu", task=TASK)
    fresh = fresh_parameters(read_hf_config(str(folder), task=TASK), TASK)
    report = load_weights(lm, folder, family=family_of(config.model_type), may_be_missing=fresh)
    initialise_score_head(lm, objective, report.missing, seed=seed, where=full_fragment)
    return lm, report


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2"])
def test_a_new_head_is_drawn_and_the_old_one_left_over(family: str, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_config(config_of(family))
    base.save_pretrained(tmp_path)
    lm, report = loaded(tmp_path, Classification(LABELS), config_of(family))
    assert report.missing == ("score.weight",)
    assert "lm_head.weight" in report.skipped or base.config.tie_word_embeddings
    torch.testing.assert_close(lm.model.state_dict(), base.model.state_dict(), rtol=0, atol=0)
    again, _ = loaded(tmp_path, Classification(LABELS), config_of(family))
    other, _ = loaded(tmp_path, Classification(LABELS), config_of(family), seed=1)
    assert torch.equal(lm.score.weight, again.score.weight)
    assert not torch.equal(lm.score.weight, other.score.weight)
    assert lm.score.weight.std().item() == pytest.approx(base.config.initializer_range, rel=0.3)


def test_the_first_loss_of_a_reward_model_is_ln_2(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config_of("llama", 1)).save_pretrained(tmp_path)
    lm, _ = loaded(tmp_path, Reward(), config_of("llama", 1))
    install_score_head(lm, Reward())
    model = TrainedModel(lm)
    row = packed_row(texts((5, 7, 9, 4)), [0.0] * 4)
    plan = BatchPlan(1, 1, 0, 1, 0, False, PAD, 32, documents_per_unit=2)
    (micro,) = make_batch([row], plan, Position(0, 0), ()).micro
    found = model(host_rows(micro, None))
    assert found.loss.item() / 2 == pytest.approx(math.log(2), abs=1e-3)
    found.loss.backward()
    assert all(param.grad is not None and param.grad.any() for param in model.parameters())


def test_a_base_that_is_a_classifier_keeps_its_head(tmp_path: Path) -> None:
    config = config_of("llama")
    config.id2label = {0: "no", 1: "maybe", 2: "yes"}
    base = AutoModelForSequenceClassification.from_config(config)
    base.save_pretrained(tmp_path)
    lm, report = loaded(tmp_path, Classification(LABELS), config_of("llama"))
    assert report.missing == ()
    assert torch.equal(lm.score.weight, base.score.weight)
    published = read_hf_config(str(tmp_path), task=TASK)
    section = with_base_classes(ClassificationObjective(name="classification"), published)
    assert section == ClassificationObjective(name="classification", num_labels=3, labels=("no", "maybe", "yes"))
    with pytest.raises(ModelError, match="yes, no, maybe has another order than the base model"):
        with_base_classes(ClassificationObjective(name="classification", labels=("yes", "no", "maybe")), published)
    with pytest.raises(ModelError, match="classifier with 3 labels, but the run trains 2"):
        with_base_classes(ClassificationObjective(name="classification", num_labels=2), published)
    with pytest.raises(ModelError, match="classifier with 3 labels, but the run trains 1"):
        set_classes(published, RewardObjective(name="reward"), outputs=1)


def test_an_enlarged_vocabulary_leaves_the_old_head_over(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_config(config_of("llama"))
    base.save_pretrained(tmp_path)
    config = config_of("llama")
    config.vocab_size = 104
    lm = build_skeleton(config, attention="sdpa", dtype=torch.float32, device="cpu", task=TASK)
    growth = Growth(96, 104, partial(seed_of, 0))
    report = load_weights(lm, tmp_path, family=family_of("llama"), growth=growth, may_be_missing=("score.weight",))
    assert report.skipped == ("lm_head.weight",)
    assert torch.equal(lm.get_input_embeddings().weight[:96], base.get_input_embeddings().weight)


def test_a_classifier_without_its_head_is_incomplete(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(tree | {"architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ModelError, match=r"1 missing: score\.weight"):
        loaded(tmp_path, Classification(LABELS), config_of("llama"))


class Tokenizer:
    """The parts of a tokenizer that decide on padding."""

    def __init__(self, pad: int | None, added: dict[str, int], unknown: int | None = None) -> None:
        self.pad_token_id, self.eos_token_id, self.bos_token_id, self.unk_token_id = pad, 2, 1, unknown
        self.pad_token, self.chat_template, self._added = None if pad is None else f"<{pad}>", "", added

    def get_added_vocab(self) -> dict[str, int]:
        return self._added

    def get_vocab(self) -> dict[str, int]:
        return {"<s>": 1, "</s>": 2, **self._added}

    def convert_ids_to_tokens(self, number: int) -> str:
        return f"<{number}>"


@pytest.mark.parametrize(
    ("tokenizer", "wanted"),
    [
        (Tokenizer(5, {}), 5),
        (Tokenizer(2, {"<|fim_pad|>": 9, "<|image|>": 7}), 9),
        (Tokenizer(None, {"<|reserved_1|>": 90, "<|reserved_0|>": 80}), 80),
        (Tokenizer(2, {"<|pad|>": 400}, unknown=3), 3),
        (Tokenizer(2, {"<s>": 1, "<|User|>": 60}), 61),
        (Tokenizer(None, {}), 3),
    ],
)
def test_padding_is_no_token_that_ends_documents(tokenizer: Any, wanted: int) -> None:
    config = config_of("llama")
    config.pad_token_id, config.eos_token_id = None, [2, 4]
    assert f"({wanted})" in set_padding_token(config, tokenizer)
    assert config.pad_token_id == wanted


def test_a_tokenizer_whose_only_padding_ends_documents_is_refused() -> None:
    config = config_of("llama")
    config.pad_token_id, config.eos_token_id = 4, [2, 4]
    last = config.vocab_size - 1
    with pytest.raises(
        ModelError, match=f"no padding token but '<2>'.*{last + 1} ids leave none of the model's {last + 1}"
    ) as refused:
        set_padding_token(config, Tokenizer(2, {"<|User|>": last}))  # type: ignore[arg-type]
    assert refused.value.hint == (
        'write "pad_token": "<|pad|>" in tokenizer_config.json and set model.resize_vocabulary: true'
    )
