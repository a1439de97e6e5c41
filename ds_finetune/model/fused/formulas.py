"""Formulas of RMSNorm, rotary embedding, SwiGLU and their gradients. torch.compile makes one kernel of each formula.
Intermediate results are rounded to the dtype of hidden states where transformers rounds them.
"""

from typing import NamedTuple

import torch
from torch.nn import functional


class Rotation(NamedTuple):
    """How a rotary embedding rotates the first `width` columns of a head."""

    width: int
    in_pairs: bool
    """Whether adjacent columns are rotated, instead of column i with column i + width / 2."""
    is_back: bool = False


def norm(rows: torch.Tensor, weight: torch.Tensor, eps: float, rounds_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of rows [rows, width] times `weight`. Also returns inverse root mean squares, which backward needs.

    `rounds_last` rounds the product with the weight to the dtype of `rows` (gpt_oss), instead of the normalised row.
    """
    wide = rows.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale
    return (weight * normed).to(rows.dtype) if rounds_last else weight * normed.to(rows.dtype), scale


def norm_backward(
    grad: torch.Tensor, saved: tuple[torch.Tensor, ...], rounds_last: bool, needs_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """RMSNorm's gradients for rows and weight (None if not needed). `saved`: rows, weight, inverse root mean square."""
    rows, weight, scale = saved
    normed = rows.float() * scale
    by_weight = grad.float() * weight.float() if rounds_last else (grad * weight).float()
    d_rows = scale * (by_weight - normed * (by_weight * normed).mean(-1, keepdim=True))
    if not needs_weight:
        return d_rows.to(rows.dtype), None
    d_weight = (grad.float() * (normed if rounds_last else normed.to(rows.dtype))).sum(0)
    return d_rows.to(rows.dtype), d_weight.to(weight.dtype)


def rotate(
    tensors: tuple[torch.Tensor, ...], angles: tuple[torch.Tensor, ...], rotation: Rotation, is_backward: bool
) -> tuple[torch.Tensor, ...]:
    """Apply the rotary embedding to queries and keys [rows, heads, tokens, columns], with cosines and sines [rows,
    tokens, width / 2 or more]. In the result, rotated pairs are columns i and i + width / 2. With `is_backward`, map
    gradients of the result to gradients of the inputs.
    """
    half = rotation.width // 2
    cos, sin = (each[:, None, :, :half] for each in angles)
    return tuple(_rotated(each, cos, -sin if is_backward else sin, rotation, is_backward) for each in tensors)


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation, is_backward: bool
) -> torch.Tensor:
    width, unrotated = rotation.width, x[..., rotation.width :]
    from_pairs = rotation.in_pairs and not is_backward
    a, b = (x[..., 0:width:2], x[..., 1:width:2]) if from_pairs else x[..., :width].chunk(2, -1)
    a, b = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
    return torch.cat(
        [torch.stack([a, b], -1).flatten(-2), unrotated] if rotation.in_pairs and is_backward else [a, b, unrotated], -1
    )


def gate(*parts: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) x up, [rows, width]. `parts` are gate and up, or one tensor with both concatenated."""
    gate, up = parts if len(parts) > 1 else parts[0].chunk(2, -1)
    return functional.silu(gate) * up


def gate_backward(grad: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of SwiGLU's inputs `parts`, from the gradient `grad` of its output."""
    gate, up = parts if len(parts) > 1 else parts[0].chunk(2, -1)
    wide = gate.float()
    sigmoid = torch.sigmoid(wide)
    d_gate = (grad.float() * up * sigmoid * (1 + wide * (1 - sigmoid))).to(gate.dtype)
    d_parts = d_gate, grad * (wide * sigmoid).to(gate.dtype)
    return d_parts if len(parts) > 1 else (torch.cat(d_parts, -1),)
