"""RMSNorm, rotary embedding and SwiGLU with their gradients, as plain formulas, which torch.compile makes one kernel
each. What transformers rounds to the precision of hidden states is rounded here too.
"""

import torch
from torch.nn import functional


def norm(rows: torch.Tensor, weight: torch.Tensor, eps: float, rounds_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, width] over their root mean square, times `weight`; and what backward needs of the root.

    `rounds_last` multiplies by the weight before rounding (gpt_oss), not after.
    """
    wide = rows.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounds_last:
        return (weight * (wide * scale)).to(rows.dtype), scale
    return weight * (wide * scale).to(rows.dtype), scale


def norm_backward(  # noqa: PLR0913 - the tensors of a norm
    grad: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    rounds_last: bool,
    needs_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of rows and weight; None where the weight needs none."""
    normed = rows.float() * scale
    by_weight = grad.float() * weight.float() if rounds_last else (grad * weight).float()
    d_rows = scale * (by_weight - normed * (by_weight * normed).mean(-1, keepdim=True))
    if not needs_weight:
        return d_rows.to(rows.dtype), None
    d_weight = (grad.float() * (normed if rounds_last else normed.to(rows.dtype))).sum(0)
    return d_rows.to(rows.dtype), d_weight.to(weight.dtype)


def rotate(  # noqa: PLR0913 - queries, keys and how they are turned
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int, in_pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [rows, heads, tokens, columns] whose first `width` columns are turned by cosines and sines
    [rows, tokens, width / 2 or more]. Columns that turn together are neighbours where they are `in_pairs`, and half the
    width apart elsewhere, as they always are in the result.
    """
    first, second = _turned(query, cos, sin, width, in_pairs), _turned(key, cos, sin, width, in_pairs)
    return first, second


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int, in_pairs: bool) -> torch.Tensor:
    half = width // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    a, b = (x[..., 0:width:2], x[..., 1:width:2]) if in_pairs else (x[..., :half], x[..., half:width])
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), x[..., width:]], dim=-1)


def rotate_backward(  # noqa: PLR0913 - as above
    d_query: torch.Tensor, d_key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int, in_pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of queries and keys from those of the turned ones."""
    first, second = _turned_back(d_query, cos, sin, width, in_pairs), _turned_back(d_key, cos, sin, width, in_pairs)
    return first, second


def _turned_back(d: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int, in_pairs: bool) -> torch.Tensor:
    half = width // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    a, b = d[..., :half], d[..., half:width]
    a, b = (a * cos + b * sin).to(d.dtype), (b * cos - a * sin).to(d.dtype)
    return torch.cat([torch.stack([a, b], -1).flatten(-2), d[..., width:]] if in_pairs else [a, b, d[..., width:]], -1)


def gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) x up, [rows, width]."""
    return functional.silu(gate) * up


def gate_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up."""
    wide = gate.float()
    sigmoid = torch.sigmoid(wide)
    d_silu = sigmoid * (1 + wide * (1 - sigmoid))
    return (grad.float() * up * d_silu).to(gate.dtype), (grad * (wide * sigmoid).to(gate.dtype))


def joined_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """As `gate`, of both side by side [rows, 2 width]."""
    return gate(*gate_up.chunk(2, dim=-1))


def joined_gate_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The gradient of both."""
    return torch.cat(gate_backward(grad, *gate_up.chunk(2, dim=-1)), dim=-1)
