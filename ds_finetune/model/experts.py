"""Routed experts on CPUs: one product for each expert, and rows gathered and added up in one pass each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

BY_EXPERT = "ds_finetune_by_expert"
"""Name of this implementation in a model's configuration."""


class _Routes(NamedTuple):
    """Where the rows of each expert come from: a row is a token at one of the k experts that it chose."""

    token: torch.Tensor
    """Token of each row, rows sorted by expert, int64 [rows]."""
    row: torch.Tensor
    """Row of each token's choice, int64 [tokens, k]."""
    sizes: list[int]
    """Rows of each expert."""


def _sort_by_expert(chosen: torch.Tensor, num_experts: int) -> _Routes:
    """The routes of the `chosen` experts, int64 [tokens, k]."""
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=order.device)
    return _Routes(order // chosen.shape[1], row.view_as(chosen), flat.bincount(minlength=num_experts).tolist())


def _multiply(rows: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The product of each expert's `rows` [rows, in] with its matrix of `weights` [experts, in, out]: [rows, out]."""
    out = rows.new_empty(len(rows), weights.shape[2])
    for part, weight, product in zip(rows.split(sizes), weights.unbind(), out.split(sizes), strict=True):
        if len(part):
            torch.mm(part, weight, out=product)
    return out


def _weight_gradients(left: torch.Tensor, right: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """`left.T @ right` over each expert's rows, [experts, columns of `left`, columns of `right`]."""
    out = left.new_empty(len(sizes), left.shape[1], right.shape[1])
    for a, b, product in zip(left.split(sizes), right.split(sizes), out.unbind(), strict=True):
        if len(a):
            torch.mm(a.T, b, out=product)
        else:
            product.zero_()
    return out


def _add_up(rows: torch.Tensor, routes: _Routes) -> torch.Tensor:
    """The sum of the rows of each token, [tokens, columns]; sums of 16-bit rows are fp32 inside."""
    return functional.embedding_bag(routes.row, rows, mode="sum")


class _GatedExperts(torch.autograd.Function):
    """The weighted sum over each token's experts of `down(silu(gate(x)) * up(x))`.

    The weight of a choice is multiplied into what goes into `down`, the narrower side, so that the outputs of the
    experts are neither weighted nor kept for backward: its gradient is the product of that side with its own gradient.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd passes its inputs by position
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        choice_weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        routes = _sort_by_expert(chosen, len(gate_up))
        gated = _multiply(hidden.index_select(0, routes.token), gate_up.transpose(1, 2), routes.sizes)
        gate, up = gated.chunk(2, dim=1)
        weights = _of_rows(choice_weights, routes)
        inner = functional.silu(gate).mul_(up).mul_(weights)
        ctx.save_for_backward(hidden, choice_weights, gate_up, down, gated, *routes[:2])
        ctx.sizes = routes.sizes
        return _add_up(_multiply(inner, down.transpose(1, 2), routes.sizes), routes)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        hidden, choice_weights, gate_up, down, gated, token, row = ctx.saved_tensors
        routes, needs = _Routes(token, row, ctx.sizes), ctx.needs_input_grad
        d_rows = d_out.index_select(0, token)
        weights = _of_rows(choice_weights, routes)
        gate, up = gated.chunk(2, dim=1)
        active = functional.silu(gate)
        inner = active * up
        d_inner = _multiply(d_rows, down, routes.sizes)
        d_choices = None
        if needs[1]:
            d_choices = _dot(inner, d_inner, choice_weights.dtype)[row]
        d_down = _weight_gradients(d_rows, inner.mul_(weights), routes.sizes) if needs[3] else None
        d_inner.mul_(weights)
        d_gated = torch.empty_like(gated)
        d_gate, d_up = d_gated.chunk(2, dim=1)
        torch.mul(d_inner, active, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_inner.mul_(up), gate, grad_input=d_gate)
        d_gate_up = d_hidden = None
        if needs[2]:
            d_gate_up = _weight_gradients(d_gated, hidden.index_select(0, token), routes.sizes)
        if needs[0]:
            d_hidden = _add_up(_multiply(d_gated, gate_up, routes.sizes), routes)
        return d_hidden, d_choices, d_gate_up, d_down, None


def _of_rows(choice_weights: torch.Tensor, routes: _Routes) -> torch.Tensor:
    """The weight of each row, [rows, 1]."""
    weights = choice_weights.new_empty(choice_weights.numel())
    weights[routes.row.view(-1)] = choice_weights.reshape(-1)
    return weights[:, None]


def _dot(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The dot product of each row of `left` with that of `right`, [rows]."""
    return torch.linalg.vecdot(left.to(dtype), right.to(dtype))


def run_by_expert(
    module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, choice_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface (5.23, integrations/moe.py:609): `hidden` [tokens, width], `chosen` int64
    [tokens, k] and `choice_weights` [tokens, k] -> [tokens, width].
    """
    gate_up: Any = module.gate_up_proj
    down: Any = module.down_proj
    return _GatedExperts.apply(hidden, choice_weights, gate_up, down, chosen)  # type: ignore[no-any-return]
