"""Liger's Triton kernels of RMSNorm, rotary embedding and SwiGLU, as `model/fused/formulas.py` has them.

Its autograd functions are not used. They turn queries and keys in place without telling autograd, and keep copies of
what is not contiguous.
"""

import torch
from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
from liger_kernel.ops.rope import rope_backward, rope_forward
from liger_kernel.ops.swiglu import (
    swiglu_backward,
    swiglu_forward,
    swiglu_fused_gate_up_backward,
    swiglu_fused_gate_up_forward,
)
from liger_kernel.ops.utils import calculate_settings

from ds_finetune.foreign.guard import Foreign

_NORM = Foreign("liger-kernel", "ops/rms_norm.py:449, 526")
_ROPE = Foreign("liger-kernel", "ops/rope.py:135, 201")
_GATE = Foreign("liger-kernel", "ops/swiglu.py:159, 201, 364, 389")
_NORM.parameters(rms_norm_forward, "X", "W", "eps", "offset", "casting_mode", "row_mode")
_NORM.parameters(rms_norm_backward, "dY", "RSTD", "num_warps", "in_place", "needs_dw")
_ROPE.parameters(rope_forward, "q", "k", "cos", "sin", "rotary_dim")
_ROPE.parameters(rope_backward, "dq", "dk", "cos", "sin", "rotary_dim")
_GATE.parameters(swiglu_fused_gate_up_backward, "y", "dc", "in_place")

_LLAMA, _GEMMA = 0, 1
"""Casting modes: the normalised row is rounded before it is multiplied by the weight, or after (liger-kernel 0.8.5,
ops/rms_norm.py:62-64)."""


def norm(rows: torch.Tensor, weight: torch.Tensor, eps: float, rounds_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As the formula; what backward needs is the reciprocal of the root, fp32 [rows]."""
    out, _, scale, *_ = rms_norm_forward(rows, weight, eps, 0.0, _GEMMA if rounds_last else _LLAMA, None)
    return out, scale


def norm_backward(  # noqa: PLR0913 - as the formula
    grad: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    rounds_last: bool,
    needs_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the formula. `grad` is not overwritten: residual connections read the same tensor."""
    mode = _GEMMA if rounds_last else _LLAMA
    block, warps = calculate_settings(rows.shape[-1])
    found: tuple[torch.Tensor, torch.Tensor | None] = rms_norm_backward(
        grad, rows, weight, scale, 0.0, mode, block, warps, in_place=False, row_mode=None, needs_dw=needs_weight
    )
    return found


def rotate(  # noqa: PLR0913 - as the formula
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int, in_pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the formula; the kernel turns copies in place."""
    query, key = (_copy(each, width, in_pairs=in_pairs) for each in (query, key))
    query, key, *_ = rope_forward(query, key, cos, sin, rotary_dim=width)
    return query, key


def rotate_backward(  # noqa: PLR0913 - as the formula
    d_query: torch.Tensor, d_key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int, in_pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the formula."""
    d_query, d_key = (_copy(each, width, in_pairs=False) for each in (d_query, d_key))
    d_query, d_key = rope_backward(d_query, d_key, cos, sin, rotary_dim=width)
    if not in_pairs:
        return d_query, d_key
    d_query, d_key = (_regrouped(each, width, (2, -1)) for each in (d_query, d_key))
    return d_query, d_key


def _copy(x: torch.Tensor, width: int, *, in_pairs: bool) -> torch.Tensor:
    """A copy of [rows, heads, tokens, columns] that is contiguous with heads after tokens, as the kernel takes it."""
    x = x.transpose(1, 2)
    x = _regrouped(x, width, (-1, 2)) if in_pairs else x.clone(memory_format=torch.contiguous_format)
    return x.transpose(1, 2)


def _regrouped(x: torch.Tensor, width: int, shape: tuple[int, int]) -> torch.Tensor:
    """A contiguous copy whose first `width` columns, in this shape, are transposed."""
    turned = x[..., :width].unflatten(-1, shape).mT
    if width == x.shape[-1]:
        return turned.clone(memory_format=torch.contiguous_format).flatten(-2)
    return torch.cat([turned.flatten(-2), x[..., width:]], dim=-1)


def gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As the formula."""
    return swiglu_forward(gate, up)[2]  # type: ignore[no-any-return]


def gate_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the formula; the gradients overwrite gate and up."""
    return swiglu_backward(gate, up, grad)  # type: ignore[no-any-return]


def joined_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """As the formula."""
    return swiglu_fused_gate_up_forward(gate_up)[1]  # type: ignore[no-any-return]


def joined_gate_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """As the formula; the gradient overwrites both."""
    return swiglu_fused_gate_up_backward(gate_up, grad, in_place=True)  # type: ignore[no-any-return]
