"""Experts run one by one on CPUs equal transformers' own loop over them, values and gradients."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from ds_finetune.families.table import FAMILIES
from ds_finetune.model import experts
from ds_finetune.model.build import build_skeleton
from ds_finetune.model.experts import BY_EXPERT
from tests.model.tiny import CONFIGS

EXPERTS, K, WIDTH, TOKENS = 8, 3, 16, 40


def _experts(dtype: torch.dtype, *, width: int = WIDTH, inner: int = 8) -> DeepseekV3Experts:
    config = DeepseekV3Config(
        hidden_size=width, moe_intermediate_size=inner, n_routed_experts=EXPERTS, num_experts_per_tok=K
    )
    module = DeepseekV3Experts(config)
    generator = torch.Generator().manual_seed(1)
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.5, generator=generator)
    return module.to(dtype)


def _inputs(dtype: torch.dtype, *, tokens: int = TOKENS, width: int = WIDTH) -> tuple[torch.Tensor, ...]:
    """Tokens, their experts and the weights of these, and a gradient. The last two experts are never chosen."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(tokens, EXPERTS - 2, generator=generator)
    weights, chosen = scores.topk(K)
    hidden, gradient = (torch.randn(tokens, width, generator=generator).to(dtype) for _ in range(2))
    return hidden.requires_grad_(), chosen, weights.requires_grad_(), gradient


def _run(module: Any, implementation: str, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The output and the gradients of tokens, weights of choices and experts."""
    hidden, chosen, weights, gradient = inputs
    module.config._experts_implementation = implementation
    out = module(hidden, chosen, weights)
    return [out, *torch.autograd.grad(out, [hidden, weights, *module.parameters()], gradient)]


def _differences(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[float]:
    pairs = zip(mine, theirs, strict=True)
    return [(torch.linalg.norm(a.float() - b) / torch.linalg.norm(b)).item() for a, b in pairs]


def test_outputs_and_gradients_equal_the_loop() -> None:
    module, inputs = _experts(torch.float32), _inputs(torch.float32)
    assert max(_differences(_run(module, BY_EXPERT, inputs), _run(module, "eager", inputs))) < 1e-6


@pytest.mark.parametrize("numbers", [1, 2**16, 2**30])
def test_large_experts_are_as_near_to_fp64_as_the_loop(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    """In blocks of one expert, of some and of all; their products are oneDNN's where the CPU has these."""
    monkeypatch.setattr(experts, "_BLOCK_NUMBERS", numbers)
    module = _experts(torch.float32, width=192, inner=96)
    inputs = _inputs(torch.float32, tokens=200, width=192)
    mine, loop = (_run(module, name, inputs) for name in (BY_EXPERT, "eager"))
    hidden, chosen, weights, gradient = inputs
    whole = (hidden.detach().double().requires_grad_(), chosen, weights.detach().double().requires_grad_())
    exact = _run(module.double(), "eager", (*whole, gradient.double()))
    for found, wanted, limit in zip(mine, exact, loop, strict=True):
        deviations = (torch.linalg.norm(each - wanted) / torch.linalg.norm(wanted) for each in (found, limit))
        ours, theirs = (deviation.item() for deviation in deviations)
        assert ours < max(2 * theirs, 1e-6), (ours, theirs)


def test_in_bf16_they_are_as_near_to_fp32_as_the_grouped_product() -> None:
    """With rows padded by zeros, which no gradient may contain."""
    module, inputs = _experts(torch.bfloat16), _inputs(torch.bfloat16)
    mine, grouped = (_run(module, name, inputs) for name in (BY_EXPERT, "grouped_mm"))
    whole = [each.detach().float() if each.is_floating_point() else each for each in inputs]
    exact = _run(module.float(), "eager", (whole[0].requires_grad_(), whole[1], whole[2].requires_grad_(), whole[3]))
    for ours, theirs in zip(_differences(mine, exact), _differences(grouped, exact), strict=True):
        assert ours < max(1.2 * theirs, 2e-3), (ours, theirs)
    assert all(not gradient[-2:].any() for gradient in mine[3:])


def test_without_tokens_there_are_zero_gradients() -> None:
    """As on an expert parallel rank that receives none."""
    module, chosen = _experts(torch.float32), torch.zeros(0, K, dtype=torch.int64)
    hidden, weights = torch.ones(0, WIDTH).requires_grad_(), torch.ones(0, K).requires_grad_()
    out, *gradients = _run(module, BY_EXPERT, (hidden, chosen, weights, torch.ones(0, WIDTH)))
    assert out.shape == hidden.shape
    assert [gradient.any().item() for gradient in gradients] == [False] * 4


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    module, (hidden, chosen, weights, gradient) = _experts(torch.float32), _inputs(torch.float32)
    wanted = _run(module, BY_EXPERT, (hidden, chosen, weights, gradient))
    module.requires_grad_(False)
    out = module(hidden, chosen, weights.detach())
    (d_hidden,) = torch.autograd.grad(out, [hidden], gradient)
    assert torch.equal(d_hidden, wanted[1])


@pytest.mark.parametrize("kind", sorted(kind for kind in CONFIGS if FAMILIES[kind].experts_class is not None))
def test_families_with_silu_experts_use_them_and_others_do_not(kind: str) -> None:
    """gpt_oss has biases, transposed weights and a gate of its own."""
    lm = build_skeleton(
        AutoConfig.for_model(kind, **CONFIGS[kind]), attention="sdpa", dtype=torch.float32, device="cpu"
    )
    found = lm.config._experts_implementation
    assert found == ("grouped_mm" if kind == "gpt_oss" else BY_EXPERT)
