"""Liger's Triton kernels for RMSNorm, rotary embedding and SwiGLU, called like functions of model/fused/formulas.py.

Liger's own autograd functions are not used, because they overwrite queries and keys without telling autograd, and save
copies of non-contiguous tensors.
"""

from typing import Any

import torch
from liger_kernel.ops import rms_norm, rope, swiglu
from liger_kernel.ops.utils import calculate_settings

from ds_finetune.foreign.guard import Foreign

_NORM = Foreign("liger-kernel", "ops/rms_norm.py:449, 526")
_ROPE = Foreign("liger-kernel", "ops/rope.py:135, 201")
_GATE = Foreign("liger-kernel", "ops/swiglu.py:159, 201, 364, 389")
_NORM.parameters(rms_norm.rms_norm_backward, "in_place", "row_mode", "needs_dw")
_ROPE.parameters(rope.rope_backward, "rotary_dim")
_GATE.parameters(swiglu.swiglu_fused_gate_up_backward, "in_place")

_LLAMA, _GEMMA = 0, 1
"""Liger's rounding modes of RMSNorm. `_LLAMA` rounds the normalised row before it is multiplied by the weight, `_GEMMA`
rounds the product (liger-kernel 0.8.5, ops/rms_norm.py:62-64).
"""


def norm(rows: torch.Tensor, weight: torch.Tensor, eps: float, rounds_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute RMSNorm of `rows` [rows, width]. Returns the result and the inverse root mean squares, fp32 [rows]."""
    out, _, scale, *_ = rms_norm.rms_norm_forward(rows, weight, eps, 0.0, _GEMMA if rounds_last else _LLAMA, None)
    return out, scale


def norm_backward(
    grad: torch.Tensor, saved: tuple[torch.Tensor, ...], rounds_last: bool, needs_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of RMSNorm. `grad` is left unchanged, because residual connections read it too."""
    mode, (block, warps) = _GEMMA if rounds_last else _LLAMA, calculate_settings(grad.shape[-1])
    return rms_norm.rms_norm_backward(  # type: ignore[no-any-return]
        grad, *saved, 0.0, mode, block, warps, in_place=False, row_mode=None, needs_dw=needs_weight
    )


def rotate(
    tensors: tuple[torch.Tensor, ...],
    angles: tuple[torch.Tensor, ...],
    rotation: Any,  # noqa: ANN401 - that of the formula, which this package cannot import
    is_backward: bool,
) -> tuple[torch.Tensor, ...]:
    """Apply the rotary embedding to copies of queries and keys, because the kernel works in place."""
    width, in_pairs, _ = rotation
    run = rope.rope_backward if is_backward else rope.rope_forward
    copies = (_copy(each, width, in_pairs=in_pairs and not is_backward) for each in tensors)
    query, key, *_ = run(*copies, *angles, rotary_dim=width)
    if not (in_pairs and is_backward):
        return query, key
    return _regrouped(query, width, (2, -1)), _regrouped(key, width, (2, -1))


def _copy(x: torch.Tensor, width: int, *, in_pairs: bool) -> torch.Tensor:
    """Copy `x` [rows, heads, tokens, columns] with tokens before heads in memory, as the kernels expect."""
    x = x.transpose(1, 2)
    x = _regrouped(x, width, (-1, 2)) if in_pairs else x.clone(memory_format=torch.contiguous_format)
    return x.transpose(1, 2)


def _regrouped(x: torch.Tensor, width: int, shape: tuple[int, int]) -> torch.Tensor:
    grouped = x[..., :width].unflatten(-1, shape).mT
    if width == x.shape[-1]:
        return grouped.clone(memory_format=torch.contiguous_format).flatten(-2)
    return torch.cat([grouped.flatten(-2), x[..., width:]], dim=-1)


def gate(*parts: torch.Tensor) -> torch.Tensor:
    """Compute SwiGLU: silu(gate) * up, from separate or concatenated `parts`."""
    forward = swiglu.swiglu_forward if len(parts) > 1 else swiglu.swiglu_fused_gate_up_forward
    return forward(*parts)[-1]  # type: ignore[no-any-return]


def gate_backward(grad: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of SwiGLU. They overwrite `parts`, the inputs of the forward."""
    if len(parts) > 1:
        return swiglu.swiglu_backward(*parts, grad)  # type: ignore[no-any-return]
    return (swiglu.swiglu_fused_gate_up_backward(*parts, grad, in_place=True),)
