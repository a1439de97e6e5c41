"""The Triton kernel of all experts against a product for each expert, on a GPU or by Triton's interpreter
(tests/model/test_triton.py).
"""

import os
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ds_finetune.model import experts
from ds_finetune.model.kept_outputs import layer_contexts
from tests.model.test_experts import Operations, experts_of
from tests.model.tiny import CONFIGS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = find_spec("triton") is not None
pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: pip install -e .[test]"),
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="on a CPU Triton has to be interpreted: TRITON_INTERPRET=1",
    ),
]
# A result is rounded once, to half a unit of its last place; sums of a thousand fp32 products add little.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
COUNTS = {
    "some without rows": (3, 0, 70, 1, 0, 130, 0),
    "one": (65,),
    "all rows for the last": (0, 0, 0, 64),
    "none": (0, 0),
}
WIDTHS = ((45, 151), (32, 128))
PRODUCT = "ds_finetune::grouped_product"


@pytest.fixture(autouse=True)
def interpreted_products() -> Iterator[None]:
    """Triton's interpreter (3.9) multiplies the bits of bf16 as whole numbers; here it multiplies their values."""
    if DEVICE == "cuda":
        yield
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def values(handle: Any) -> Any:
        if handle.dtype != tl.bfloat16:
            return handle
        converted = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(converted, tl.float32)

    def dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return plain(self, values(left), values(right), *rest)

    with patch.object(interpreter.InterpreterBuilder, "create_dot", dot):
        yield


def _one_by_one(rows: torch.Tensor, weight: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    bounds = pairwise((0, *accumulate(counts)))
    return torch.cat([rows[start:end] @ weight[number] for number, (start, end) in enumerate(bounds)])


def _differs(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-9)) if exact.numel() else 0.0


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("width", "columns"), WIDTHS)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_product_and_gradients_are_those_of_each_expert(
    dtype: torch.dtype, name: str, width: int, columns: int, is_transposed: bool
) -> None:
    from ds_finetune.model.grouped_kernel import grouped_product

    counts, generator = COUNTS[name], torch.Generator().manual_seed(0)
    shape = (len(counts), columns, width) if is_transposed else (len(counts), width, columns)
    rows, weight, grad = (
        torch.randn(size, generator=generator).to(DEVICE, dtype)
        for size in ((sum(counts), width), shape, (sum(counts), columns))
    )
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=DEVICE)

    def run(multiply: Any, rows: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, *given: Any) -> Any:
        rows, weight = rows.detach().requires_grad_(), weight.detach().requires_grad_()
        out = multiply(rows, weight.transpose(1, 2) if is_transposed else weight, *given)
        return out, *torch.autograd.grad(out, (rows, weight), grad)

    found = run(grouped_product, rows, weight, grad, ends)
    exact = run(_one_by_one, rows.double(), weight.double(), grad.double(), counts)
    for one, other in zip(found, exact, strict=True):
        assert (one.shape, one.dtype) == (other.shape, dtype)
        assert _differs(one.detach(), other.detach()) <= BOUNDS[dtype]
    assert found[2].stride() == weight.stride()
    assert not found[2][[number for number, count in enumerate(counts) if not count]].any()


@pytest.mark.parametrize(("trained", "saved"), [("rows", {"weight", "ends"}), ("weight", {"rows", "weight", "ends"})])
def test_frozen_experts_keep_no_rows(trained: str, saved: set[str]) -> None:
    from ds_finetune.model.grouped_kernel import grouped_product

    given = {
        "rows": torch.randn(5, 16, device=DEVICE),
        "weight": torch.randn(2, 16, 16, device=DEVICE),
        "ends": torch.tensor([2, 5], dtype=torch.int32, device=DEVICE),
    }
    given[trained].requires_grad_()
    found: set[str] = set()
    names = {each.data_ptr(): name for name, each in given.items()}
    with saved_tensors_hooks(lambda tensor: found.add(names[tensor.data_ptr()]), lambda _: None):
        grouped_product(*given.values())
    assert found == saved


@pytest.fixture
def own_kernel() -> Iterator[None]:
    """Every product of experts by the kernel, on the CPU too."""
    with patch.object(experts, "_is_own_kernel", lambda *_: True):
        yield


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_experts_of_a_family_compute_the_same(family: str, own_kernel: None) -> None:
    """`gpt_oss` has biases, and its weights are transposed."""
    module = experts_of(family, torch.float32).to(DEVICE)
    generator, width = torch.Generator().manual_seed(1), CONFIGS[family]["hidden_size"]
    hidden, grad = (torch.randn(12, width, generator=generator).to(DEVICE) for _ in range(2))
    index = torch.rand(12, module.num_experts, generator=generator).topk(2).indices.to(DEVICE)
    weights = torch.rand(12, 2, generator=generator).to(DEVICE)

    def run() -> tuple[list[torch.Tensor], int]:
        given = [each.clone().requires_grad_() for each in (hidden, weights)]
        with Operations() as operations:
            out = experts.run_experts(module, given[0], index, given[1])
            found = torch.autograd.grad(out, [*given, *module.parameters()], grad)
        return [out, *found], operations.counts[PRODUCT]

    found, products = run()
    with patch.object(experts, "_is_own_kernel", lambda *_: False):
        known, without = run()
    # Two projections, and the gradients of their rows.
    assert (products, without) == (4, 0)
    for one, other in zip(found, known, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))


def test_selective_recomputation_keeps_its_output(own_kernel: None) -> None:
    rows, weight = torch.randn(5, 16, device=DEVICE, requires_grad=True), torch.randn(2, 16, 16, device=DEVICE)
    ends = torch.tensor([2, 5], dtype=torch.int32, device=DEVICE)
    module = SimpleNamespace(gate_up_proj=weight, is_transposed=False)

    def layer(rows: torch.Tensor) -> torch.Tensor:
        return experts.project(module, rows, ends, "gate_up_proj").exp()

    out = checkpoint(layer, rows, use_reentrant=False, context_fn=partial(layer_contexts, is_selective=True))
    with Operations() as operations:
        out.sum().backward()
    # Only the gradient of rows; the product is not computed again.
    assert operations.counts[PRODUCT] == 1
