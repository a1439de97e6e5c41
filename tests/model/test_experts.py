"""Routed experts against transformers' own: the same numbers by fewer operations."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig
from transformers.integrations.moe import grouped_mm_experts_forward

from ds_finetune.families.table import FAMILIES
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.experts import _Weigh, run_experts
from tests.conftest import ROOT
from tests.model.tiny import CONFIGS
from tests.rounding import rounding
from tests.running import start, torchrun

WITH_EXPERTS = [name for name, family in FAMILIES.items() if family.expert_keys is not None and name in CONFIGS]
TOKENS = 12
ACCUMULATES = 3
"""The place of `accumulate` among the arguments of index_put."""


class Operations(TorchDispatchMode):
    """Counts operations by name, and keeps the sums by index apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.counts["sums by index" if "index_put" in name and args[ACCUMULATES:] == (True,) else name] += 1
        return func(*args, **(kwargs or {}))


def experts_of(family: str, dtype: torch.dtype) -> nn.Module:
    lm = build_skeleton(AutoConfig.for_model(family, **CONFIGS[family]), attention="sdpa", dtype=dtype, device="cpu")
    experts = next(module for name, module in lm.named_modules() if name.endswith(".mlp.experts"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in experts.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return experts


def train(run: Any, family: str, dtype: torch.dtype, k: int, *, halves: bool) -> Any:
    """Output and gradients of a forward, the gradient of routing weights, and operations of both passes."""
    experts = experts_of(family, dtype)
    generator = torch.Generator().manual_seed(1)
    width = next(param for name, param in experts.named_parameters() if name == "gate_up_proj").shape
    hidden_size = width[1] if experts.is_transposed else width[2]
    hidden = torch.randn(TOKENS, hidden_size, generator=generator).to(dtype).requires_grad_()
    index = torch.rand(TOKENS, experts.num_experts, generator=generator).topk(k).indices
    weights = torch.rand(TOKENS, k, generator=generator)
    weights = (2.0 ** -(weights * 4).floor() if halves else weights).to(dtype).requires_grad_()
    with Operations() as forward:
        out = run(experts, hidden, index, weights)
    with Operations() as backward:
        out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    gradients = [out.detach(), hidden.grad, *(param.grad for param in experts.parameters())]
    return gradients, weights.grad, (forward.counts, backward.counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", [name for name in WITH_EXPERTS if not FAMILIES[name].transposed_experts])
def test_bits_are_the_same_where_the_order_of_sums_is(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of two has one order, and products with powers of two are exact wherever they are taken. transformers'
    sort is not stable, so that gradients of weights add up rows in another order.
    """
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    wanted, of_weights, _ = train(grouped_mm_experts_forward, family, dtype, 2, halves=True)
    found, also_of_weights, _ = train(run_experts, family, dtype, 2, halves=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    limit = rounding(float(of_weights.abs().max()), wanted[0].shape[-1], dtype)
    assert (also_of_weights - of_weights).abs().max() < limit


def test_weighted_rows_have_the_bits_of_autograd() -> None:
    """Products with fp32 weights are rounded once, and their sums are those of fp32."""
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(64, 48, generator=generator).bfloat16(), torch.rand(64, 1, generator=generator)
    grad = torch.randn(64, 48, generator=generator).bfloat16()
    found = []
    for weigh in (_Weigh.apply, lambda a, b: (a * b).to(a.dtype)):
        given = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        out = weigh(*given)
        found.append((out.detach(), *torch.autograd.grad(out, given, grad)))
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_other_sums_differ_by_rounding(family: str, k: int) -> None:
    wanted, of_weights, _ = train(grouped_mm_experts_forward, family, torch.float32, k, halves=False)
    found, also_of_weights, _ = train(run_experts, family, torch.float32, k, halves=False)
    for a, b in zip([*found, also_of_weights], [*wanted, of_weights], strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_backward_neither_sorts_nor_adds_by_index(family: str) -> None:
    *_, before = train(grouped_mm_experts_forward, family, torch.bfloat16, 2, halves=False)
    *_, after = train(run_experts, family, torch.bfloat16, 2, halves=False)
    assert before[1]["sums by index"] >= 3
    for counts in after:
        assert not counts["sums by index"]
    assert after[0]["aten::sort.stable"] == 1
    assert not [name for name in after[1] if "sort" in name]
    assert not [name for counts in after for name in counts if "local_scalar" in name]
    totals = [sum(counts.values()) for counts in (*before, *after)]
    assert totals[3] <= totals[1], totals


def test_a_rank_without_rows_takes_part_in_recomputed_exchanges() -> None:
    done = start(torchrun(str(Path(__file__).with_name("no_row_worker.py"))), {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("rank")]
    assert len(lines) == 8, done.stdout
    assert max(float(line[-1]) for line in lines) < 1e-6, done.stdout


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_recomputation_ends_before_the_down_projection(family: str) -> None:
    """No gradient needs its output, also where experts have biases."""
    experts = experts_of(family, torch.float32)
    index, weights = torch.tensor([[0, 1], [1, 2], [0, 3]]), torch.rand(3, 2, requires_grad=True)
    hidden = torch.randn(3, CONFIGS[family]["hidden_size"], requires_grad=True)
    out = checkpoint(run_experts, experts, hidden, index, weights, use_reentrant=False)
    with Operations() as operations:
        out.sum().backward()
    # The gate and up projection again, and two products for the gradients of each.
    assert operations.counts["aten::_grouped_mm"] == 5
