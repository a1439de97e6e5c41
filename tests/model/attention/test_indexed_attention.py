"""Attention with an indexer, document by document, is that of transformers on each document alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ds_finetune.errors import ModelError
from ds_finetune.families.table import FAMILIES
from ds_finetune.model.attention import indexed_attention
from ds_finetune.model.attention.indexed_attention import expect_documents, longest_document
from ds_finetune.model.build.meta_model import read_tensors
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.model.weights.load import initialise_weights
from ds_finetune.plan.lora_targets import targets_among
from ds_finetune.reference.selftest.cells import hf_config
from tests.rounding import rounding_of_outputs

INDEXED = [name for name, family in FAMILIES.items() if family.indexer is not None and not family.compresses]
SPARSE = [f"{name}_sparse" for name in INDEXED]
LENGTHS = ((20, 28), (32, 11, 5))
"""The rows are longer than the 32 tokens of `index_topk`, the documents are not; they are longer than the 6 of SPARSE."""
PROMPT = torch.tensor([[5, 9, 33, 7]])
GREEDY = {
    "attention_mask": torch.ones_like(PROMPT),
    "do_sample": False,
    "max_new_tokens": 12,
    "pad_token_id": 0,
    "use_cache": True,
}


def _models(name: str, attention: str = "sdpa", *, longest: int = 0) -> tuple[TrainedModel, PreTrainedModel]:
    """A model as it is trained on documents of `longest` tokens, and transformers' own with the same weights."""
    ours = build_skeleton(hf_config(name), attention=attention, dtype=torch.float32, device="cpu").eval()
    initialise_weights(ours, seed=2)
    expect_documents(ours, longest=longest)
    plain = AutoModelForCausalLM.from_config(hf_config(name)).float().eval()
    plain.load_state_dict(ours.state_dict())
    return TrainedModel(ours), plain


def _ids() -> torch.Tensor:
    return torch.randint(3, 90, (2, 48), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "attention", "longest"),
    [
        *((name, attention, 0) for name in INDEXED for attention in ("sdpa", "eager")),
        *((name, "sdpa", 48) for name in [*INDEXED, *SPARSE]),
    ],
)
def test_documents_of_packed_rows_are_those_of_transformers_alone(name: str, attention: str, longest: int) -> None:
    model, plain = _models(name, attention, longest=longest)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    hidden, ids = model.hidden(_ids(), positions, LENGTHS), _ids()
    for row, lengths in enumerate(LENGTHS):
        alone = [plain.model(part[None], use_cache=False).last_hidden_state[0] for part in ids[row].split(lengths)]
        wanted = torch.cat(alone)
        assert (hidden[row] - wanted).abs().max() < rounding_of_outputs(plain.config, wanted, tokens=48)


@torch.no_grad()
def test_queries_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = _models("deepseek_v32_sparse", longest=48)
    positions = torch.arange(48)[None].expand(2, -1)
    whole = model.hidden(_ids(), positions, None)
    monkeypatch.setattr(indexed_attention, "SCORES_AT_ONCE", 48 * 16 * 7)
    in_parts = model.hidden(_ids(), positions, None)
    assert (in_parts - whole).abs().max() < rounding_of_outputs(model.config, whole, tokens=48)


@torch.no_grad()
@pytest.mark.parametrize("name", INDEXED)
def test_one_token_more_than_index_topk_needs_the_indexer(name: str) -> None:
    """Which is why longer documents are refused where it is not run."""
    model, plain = _models(name)
    limit = longest_document(plain.config)
    assert limit == 32
    positions = torch.arange(48)[None].expand(2, -1)
    wanted = plain.model(_ids(), use_cache=False).last_hidden_state
    whole = model.hidden(_ids(), positions, None)
    rounding = rounding_of_outputs(plain.config, wanted, tokens=48)
    assert (whole - wanted)[:, :limit].abs().max() < rounding
    assert (whole - wanted)[:, limit].abs().max() > 100 * rounding
    expect_documents(model.lm, longest=limit)
    assert torch.equal(model.hidden(_ids(), positions, None), whole)
    expect_documents(model.lm, longest=limit + 1)
    assert (model.hidden(_ids(), positions, None) - wanted).abs().max() < rounding


@pytest.mark.parametrize("name", SPARSE)
def test_generation_beyond_index_topk_is_that_of_transformers(name: str) -> None:
    model, plain = _models(name)
    assert torch.equal(model.lm.generate(PROMPT, **GREEDY), plain.generate(PROMPT, **GREEDY))


def test_generation_without_the_indexer_ends_at_index_topk() -> None:
    model, _ = _models("deepseek_v32_sparse", "eager")
    with pytest.raises(ModelError, match="a text of 7 tokens is longer than index_topk 6"):
        model.lm.generate(PROMPT, **GREEDY)


@pytest.mark.parametrize("name", INDEXED)
def test_adapters_never_go_to_the_indexer(name: str) -> None:
    tensors = read_tensors(hf_config(name))
    assert any("indexer" in parameter for parameter in tensors.by_name)
    assert not [target.name for target in targets_among(tensors.shapes()) if "indexer" in target.name]


def test_other_families_have_no_longest_document() -> None:
    assert longest_document(hf_config("deepseek_v3")) is None
