"""Attention by document equals transformers' own with its mask, for every family, and in generation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from ds_finetune.model.attention import attend_by_document
from ds_finetune.model.build import build_skeleton
from ds_finetune.model.loss import TrainedModel, install_loss_head
from ds_finetune.model.weights import initialise_weights
from ds_finetune.selftest.cells import FAMILIES

LENGTHS = ((5, 9, 2), (16,), (1, 1, 14))
CONFIGS: dict[str, dict[str, Any]] = FAMILIES | {
    "deepseek_v2": {k: v for k, v in FAMILIES["deepseek_v3"].items() if k not in ("n_group", "topk_group")},
    "qwen3": FAMILIES["llama"] | {"head_dim": 8},
    "qwen3_moe": FAMILIES["llama"] | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def _loss_and_gradients(family: str, attention: str, extra: dict[str, Any], *, checkpointing: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    config = AutoConfig.for_model(family, **CONFIGS[family] | extra)
    lm = build_skeleton(config, attention=attention, dtype=torch.float32, device="cpu")
    initialise_weights(lm, seed=2)
    install_loss_head(lm)
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 90, (len(LENGTHS), 16), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    loss, _ = TrainedModel(lm)(ids, positions, ids.roll(-1, 1), LENGTHS)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_equals_the_mask_of_transformers(family: str, checkpointing: bool) -> None:
    loss, gradients = _loss_and_gradients(family, "sdpa", {}, checkpointing=checkpointing)
    wanted, wanted_gradients = _loss_and_gradients(family, "eager", {})
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5), name


def test_a_sliding_window_is_kept() -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    loss, _ = _loss_and_gradients("qwen2", "sdpa", window)
    assert loss == pytest.approx(_loss_and_gradients("qwen2", "eager", window)[0], rel=1e-6)
    assert abs(loss - _loss_and_gradients("qwen2", "sdpa", {})[0]) > 1e-3


@pytest.mark.parametrize("tokens", [1023, 1030])
def test_padded_values_change_nothing(tokens: int) -> None:
    query, key = (torch.randn(1, 2, tokens, 6) for _ in range(2))
    value = torch.randn(1, 2, tokens, 4)
    out, _ = attend_by_document(nn.Identity(), query, key, value, None, scaling=0.3)
    scores = (query @ key.mT * 0.3).masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
    assert torch.allclose(out.transpose(1, 2), scores.softmax(-1) @ value, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_generation_with_a_cache_equals_that_of_transformers(family: str, tmp_path: Path) -> None:
    answers = []
    for attention in ("sdpa", "eager"):
        lm = build_skeleton(AutoConfig.for_model(family, **CONFIGS[family]), attention=attention, dtype=torch.float32, device="cpu")
        initialise_weights(lm, seed=2)
        prompt = torch.tensor([[5, 9, 33, 7]])
        answers.append(lm.eval().generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8, use_cache=True))
    assert torch.equal(*answers)


def test_masked_tokens_inside_a_row_are_not_accepted() -> None:
    query = torch.randn(1, 2, 4, 6)
    with pytest.raises(AssertionError):
        attend_by_document(nn.Identity(), query, query, query, torch.ones(1, 4), scaling=1.0)
