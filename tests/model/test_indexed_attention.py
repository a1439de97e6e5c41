"""Attention without the indexer is transformers' own on documents of at most `index_topk` tokens, and no further."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ds_finetune.families.table import FAMILIES
from ds_finetune.model.build import build_skeleton
from ds_finetune.model.indexed_attention import longest_document
from ds_finetune.model.lora_plan import adaptable_modules
from ds_finetune.model.loss import TrainedModel
from ds_finetune.model.weights import initialise_weights
from ds_finetune.selftest.cells import hf_config

INDEXED = [name for name, family in FAMILIES.items() if family.indexer is not None]
LENGTHS = ((20, 28), (32, 16))
"""The rows are longer than the 32 tokens of `index_topk`, the documents are not."""


def _models(name: str, attention: str = "sdpa") -> tuple[TrainedModel, PreTrainedModel]:
    """A model as it is trained, and transformers' own with the same weights."""
    ours = build_skeleton(hf_config(name), attention=attention, dtype=torch.float32, device="cpu").eval()
    initialise_weights(ours, seed=2)
    plain = AutoModelForCausalLM.from_config(hf_config(name)).float().eval()
    plain.load_state_dict(ours.state_dict())
    return TrainedModel(ours), plain


def _ids() -> torch.Tensor:
    return torch.randint(3, 90, (2, 48), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*INDEXED, "glm_moe_dsa_deep"])
def test_documents_of_packed_rows_are_those_of_transformers_alone(name: str, attention: str) -> None:
    model, plain = _models(name, attention)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    hidden, ids = model.hidden(_ids(), positions, LENGTHS), _ids()
    for row, lengths in enumerate(LENGTHS):
        alone = [plain.model(part[None], use_cache=False).last_hidden_state[0] for part in ids[row].split(lengths)]
        assert torch.allclose(hidden[row], torch.cat(alone), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", INDEXED)
def test_one_token_more_than_index_topk_is_another_function(name: str) -> None:
    """Which is why longer documents are refused."""
    model, plain = _models(name)
    limit = longest_document(plain.config)
    assert limit == 32
    hidden = model.hidden(_ids(), torch.arange(48)[None].expand(2, -1), None)
    wanted = plain.model(_ids(), use_cache=False).last_hidden_state
    assert torch.allclose(hidden[:, :limit], wanted[:, :limit], atol=1e-5)
    assert (hidden - wanted)[:, limit].abs().max() > 1e-2


@pytest.mark.parametrize("name", INDEXED)
def test_adapters_never_go_to_the_indexer(name: str) -> None:
    lm = build_skeleton(hf_config(name), attention="sdpa", dtype=torch.float32, device="meta")
    assert any("indexer" in parameter for parameter, _ in lm.named_parameters())
    assert not [target.name for target in adaptable_modules(lm) if "indexer" in target.name]


def test_other_families_have_no_longest_document() -> None:
    assert longest_document(hf_config("deepseek_v3")) is None
