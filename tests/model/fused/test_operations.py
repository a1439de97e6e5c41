"""Fused operations against those of transformers: outputs and gradients."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb as v4_rotary
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as glm_rotary
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as gpt_oss_rotary
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb as modernbert_rotary

from ds_finetune.model.fused import formulas
from ds_finetune.model.fused.install import _rotate, _rotate_last
from ds_finetune.model.fused.operations import gate, kernels_of, norm
from tests.model.fused.fused_kernels import DEVICE, NAMES, dtypes, fused_kernels

ROUNDING = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Most of a difference, of the norm of what is wanted."""
Tensors = Sequence[torch.Tensor]


def compare(
    wanted: Callable[..., Any], found: Callable[..., Any], inputs: Tensors, like: Any = lambda out: out
) -> None:
    """Outputs, and gradients of `inputs`; `like` brings the outputs that are wanted into the order of those found."""
    results = []
    for run, ordered in ((wanted, like), (found, lambda out: out)):
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
        out = run(*leaves)
        outputs = [ordered(each) for each in (out if isinstance(out, tuple) else (out,))]
        generator = torch.Generator().manual_seed(7)
        grads = [torch.randn(each.shape, generator=generator).to(each) for each in outputs]
        torch.autograd.backward(outputs, grads)
        results.append([*(each.detach() for each in outputs), *(leaf.grad for leaf in leaves)])
    for theirs, mine in zip(*results, strict=True):
        assert (theirs is None) == (mine is None)
        if theirs is not None:
            assert mine.shape == theirs.shape
            assert mine.dtype == theirs.dtype
            error = (mine.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-30)
            assert not mine.numel() or error <= ROUNDING[theirs.dtype], float(error)


def random(*shape: int, dtype: torch.dtype, seed: int = 0, needs_grad: bool = True) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return drawn.to(DEVICE, dtype).requires_grad_(needs_grad)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GptOssRMSNorm, DeepseekV4RMSNorm])
@pytest.mark.parametrize("name", NAMES)
def test_norms(name: str, kind: type[nn.Module], is_frozen: bool) -> None:
    kernels = fused_kernels(name)
    for dtype in dtypes(name):
        for shape in ((2, 5, 37), (1, 3, 2, 8), (4, 64)):
            module: Any = kind(shape[-1], eps=1e-5).to(DEVICE, dtype)

            def wanted(hidden: torch.Tensor, weight: torch.Tensor, module: Any = module) -> Any:
                return torch.func.functional_call(module, {"weight": weight}, (hidden,))

            def found(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
                return norm(kernels, hidden, weight, 1e-5, kind is not LlamaRMSNorm)

            # transformers keeps weights of DeepSeek-V4's norms in fp32.
            own = torch.float32 if kind is DeepseekV4RMSNorm else dtype
            weight = random(shape[-1], dtype=own, needs_grad=not is_frozen)
            compare(wanted, found, [random(*shape, dtype=dtype), weight])


@pytest.mark.parametrize("kind", [LlamaRMSNorm, GptOssRMSNorm])
def test_the_formula_of_a_norm_rounds_where_transformers_does(kind: type[nn.Module]) -> None:
    module: Any = kind(64, eps=1e-5).to(torch.bfloat16)
    hidden, module.weight.data = (random(*size, dtype=torch.bfloat16, needs_grad=False) for size in ((40, 64), (64,)))
    out, _ = formulas.norm(hidden, module.weight.data, 1e-5, kind is GptOssRMSNorm)
    assert torch.equal(out, module(hidden))


def angles(rows: int, tokens: int, width: int) -> torch.Tensor:
    """Positions of packed documents times frequencies, [rows, tokens, width]: each row begins again elsewhere."""
    positions = torch.stack([torch.arange(tokens) % (tokens - 2 - row) for row in range(rows)])
    return (positions[..., None] * 0.7 ** torch.arange(width)).to(DEVICE)


def halves(x: torch.Tensor) -> torch.Tensor:
    """Columns in pairs -> those that come first in a pair before those that come second."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


ROTARY = {
    "halves": (apply_rotary_pos_emb, unchanged),
    "part": (glm_rotary, unchanged),
    "short halves": (gpt_oss_rotary, unchanged),
    "wide halves": (modernbert_rotary, unchanged),
    "pairs": (apply_rotary_pos_emb_interleave, unchanged),
    "complex pairs": (apply_rotary_emb, halves),
}


@pytest.mark.parametrize("turn", ROTARY)
@pytest.mark.parametrize("name", NAMES)
def test_rotary_embeddings(name: str, turn: str) -> None:
    kernels = fused_kernels(name)
    wanted, like = ROTARY[turn]
    found = partial(_rotate, kernels, "halves" if turn == "part" else turn)
    for dtype in dtypes(name):
        for rows, heads, key_heads, width in ((2, 3, 1, 12), (1, 4, 2, 10)):
            # Queries as projections leave them, and keys that are some columns of a wider output.
            query = random(rows, 7, heads, width, dtype=dtype).transpose(1, 2)
            key = random(rows, 7, key_heads, width + 4, dtype=dtype).transpose(1, 2)[..., 4:]
            half = angles(1 if heads == 4 else rows, 7, (width - 4 if turn == "part" else width) // 2)
            given: tuple[torch.Tensor, ...] = (torch.polar(torch.ones_like(half), half),)
            mine: tuple[torch.Tensor, ...] = (torch.stack([half.cos(), half.sin()]),)
            if turn != "complex pairs":
                whole = half if turn == "short halves" else torch.cat([half, half], dim=-1)
                mine = given = whole.cos().to(dtype), whole.sin().to(dtype)
            inputs = [query, key]
            before = [each.detach().clone() for each in inputs]
            compare(lambda *x, g=given: wanted(*x, *g), lambda *x, g=mine: found(*x, *g), inputs, like)
            assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_last_pairs_are_turned_and_turned_back(name: str, heads: int) -> None:
    """Columns of DeepSeek-V4's heads are half the width apart between both."""
    turn, theirs = partial(_rotate_last, fused_kernels(name)), partial(v4_rotary, unsqueeze_dim=2)

    def like(out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[..., :12], halves(out[..., 12:])], -1)

    for dtype in dtypes(name):
        x, half = random(2, 7, heads, 20, dtype=dtype), angles(2, 7, 4)
        cos, sin = half.cos().to(dtype), half.sin().to(dtype)
        given = {"cos": cos, "sin": sin}
        compare(partial(theirs, **given), partial(turn, **given), [x], like)
        back = partial(turn, **given, is_back=True)
        compare(partial(theirs, cos=cos, sin=-sin), lambda x, back=back: back(like(x)), [x])


@pytest.mark.parametrize("name", NAMES)
def test_gates(name: str) -> None:
    kernels = fused_kernels(name)
    for dtype in dtypes(name):
        for shape in ((2, 5, 37), (6, 16), (0, 8)):
            both = [random(*shape, dtype=dtype, seed=seed) for seed in range(2)]
            compare(lambda a, b: functional.silu(a) * b, lambda a, b: gate(kernels, a, b), both)

            def of_joined(x: torch.Tensor) -> torch.Tensor:
                left, right = x.chunk(2, dim=-1)
                return functional.silu(left) * right

            joined = random(*shape[:-1], 2 * shape[-1], dtype=dtype)
            compare(of_joined, lambda x: gate(kernels, x), [joined])


@pytest.mark.parametrize("name", NAMES)
def test_a_second_backward_of_what_was_overwritten_is_an_error(name: str) -> None:
    kernels = fused_kernels(name)
    for run in (lambda x: gate(kernels, x * 1, x * 2), lambda x: gate(kernels, x * 1)):
        out = run(random(3, 8, dtype=torch.float32))
        out.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.slow
def test_packed_rows_of_any_length_are_not_compiled_again() -> None:
    kernels = fused_kernels("compile")
    dtype = torch.float32

    def step(rows: int, tokens: int) -> None:
        hidden, weight = random(rows, tokens, 24, dtype=dtype), random(24, dtype=dtype)
        heads = norm(kernels, hidden, weight, 1e-6, False).unflatten(-1, (3, 8)).transpose(1, 2)
        half = angles(rows, tokens, 4)
        cos = torch.cat([half, half], dim=-1)
        query, key = _rotate(kernels, "halves", heads, heads[:, :2], cos.cos(), cos.sin())
        gate(kernels, gate(kernels, query, query * 1) * key.sum()).sum().backward()

    step(2, 9)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, tokens in ((2, 13), (3, 8), (5, 31)):
            step(rows, tokens)


def test_backward_in_its_own_thread_has_all_variants_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where torch.compile's limit of eight variants must not count."""
    # Without a C++ compiler's seconds for each.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    kernels = kernels_of.__wrapped__("compile")
    errors: list[Exception] = []

    def backward(out: torch.Tensor) -> None:
        try:
            out.sum().backward()
        except Exception as error:  # noqa: BLE001 - it is raised in the test
            errors.append(error)

    variants = itertools.product((torch.float32, torch.bfloat16, torch.float16), (False, True), (False, True))
    for dtype, rounds_last, is_frozen in variants:
        weight = random(24, dtype=dtype, needs_grad=not is_frozen)
        thread = Thread(target=backward, args=(norm(kernels, random(4, 24, dtype=dtype), weight, 1e-6, rounds_last),))
        thread.start()
        thread.join()
    torch._dynamo.reset()
    assert not errors
