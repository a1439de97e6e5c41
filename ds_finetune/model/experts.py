"""Routed experts on CPUs: one product for each expert, and rows gathered and added up in one pass each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ds_finetune.patches.transformers_experts import is_silu_gated, register_experts

BY_EXPERT = "ds_finetune_by_expert"
"""Name of this implementation in a model's configuration."""
_ROW_MULTIPLE = 8
"""Rows of an expert in 16 bits are padded to a multiple of this number: oneDNN compiles its 16-bit products for each
number of rows, which takes longer than a small product and would happen in every step. Products in fp32 are MKL's.
"""


class _Routes(NamedTuple):
    """Where the rows of each expert come from: a row is a token at one of the k experts that it chose, or padding."""

    token: torch.Tensor
    """Token of each row, rows sorted by expert, int64 [rows]; 0 for padding."""
    row: torch.Tensor
    """Row of each token's choice, int64 [tokens, k]."""
    padding: torch.Tensor
    """Rows that are padding, int64."""
    sizes: list[int]
    """Rows of each expert, with padding."""

    def gather(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of `tokens` [tokens, columns]: [rows, columns], zeros for padding."""
        return tokens.index_select(0, self.token).index_fill_(0, self.padding, 0)

    def add_up(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of the rows of each token, [tokens, columns]; sums of 16-bit rows are fp32 inside."""
        return functional.embedding_bag(self.row, rows, mode="sum")

    def spread(self, choice_weights: torch.Tensor) -> torch.Tensor:
        """The weight of each row, [rows, 1], from those of choices [tokens, k]; 0 for padding."""
        weights = choice_weights.new_zeros(len(self.token))
        weights[self.row.view(-1)] = choice_weights.reshape(-1)
        return weights[:, None]


def _sort_by_expert(chosen: torch.Tensor, num_experts: int, multiple: int) -> _Routes:
    """The routes of the `chosen` experts, int64 [tokens, k], whose rows are padded to a `multiple`."""
    flat = chosen.reshape(-1)
    experts, order = flat.sort(stable=True)
    counts = flat.bincount(minlength=num_experts)
    sizes = (counts + multiple - 1) // multiple * multiple
    padded_before = (sizes - counts).cumsum(0) - (sizes - counts)
    place = torch.arange(len(order)) + padded_before[experts]
    token = order.new_full((int(sizes.sum()),), -1)
    token[place] = order // chosen.shape[1]
    row = torch.empty_like(order)
    row[order] = place
    padding = (token < 0).nonzero().squeeze(1)
    return _Routes(token.clamp_(min=0), row.view_as(chosen), padding, sizes.tolist())


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
        routes = _sort_by_expert(chosen, len(gate_up), 1 if hidden.dtype.itemsize >= 4 else _ROW_MULTIPLE)
        gated = _multiply(routes.gather(hidden), gate_up.transpose(1, 2), routes.sizes)
        gate, up = gated.chunk(2, dim=1)
        inner = functional.silu(gate).mul_(up).mul_(routes.spread(choice_weights))
        ctx.save_for_backward(hidden, choice_weights, gate_up, down, gated, *routes[:3])
        ctx.sizes = routes.sizes
        return routes.add_up(_multiply(inner, down.transpose(1, 2), routes.sizes))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        hidden, choice_weights, gate_up, down, gated, token, row, padding = ctx.saved_tensors
        routes, needs = _Routes(token, row, padding, ctx.sizes), ctx.needs_input_grad
        weights, d_rows = routes.spread(choice_weights), routes.gather(d_out)
        gate, up = gated.chunk(2, dim=1)
        active = functional.silu(gate)
        inner, d_inner = active * up, _multiply(d_rows, down, routes.sizes)
        d_choices = None
        if needs[1]:
            dtype = choice_weights.dtype
            d_choices = torch.linalg.vecdot(inner.to(dtype), d_inner.to(dtype))[routes.row]
        d_down = _weight_gradients(d_rows, inner.mul_(weights), routes.sizes) if needs[3] else None
        d_gated = _gate_gradient(d_inner.mul_(weights), gate, up, active)
        d_gate_up = _weight_gradients(d_gated, routes.gather(hidden), routes.sizes) if needs[2] else None
        d_hidden = routes.add_up(_multiply(d_gated, gate_up, routes.sizes)) if needs[0] else None
        return d_hidden, d_choices, d_gate_up, d_down, None


def _gate_gradient(d_inner: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """The gradient of `[gate, up]` from that of `active * up`, which is overwritten; `active` is silu(gate)."""
    d_gated = gate.new_empty(len(gate), 2 * gate.shape[1])
    d_gate, d_up = d_gated.chunk(2, dim=1)
    torch.mul(d_inner, active, out=d_up)
    torch.ops.aten.silu_backward.grad_input(d_inner.mul_(up), gate, grad_input=d_gate)
    return d_gated


def run_by_expert(
    module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, choice_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface (5.23, integrations/moe.py:609): `hidden` [tokens, width], `chosen` int64
    [tokens, k] and `choice_weights` [tokens, k] -> [tokens, width].
    """
    gate_up: Any = module.gate_up_proj
    down: Any = module.down_proj
    return _GatedExperts.apply(hidden, choice_weights, gate_up, down, chosen)  # type: ignore[no-any-return]


def install_experts(model: nn.Module) -> None:
    """Let the routed experts of a model on the CPU run by expert, in place, where they are gated by SiLU and have no
    biases and no transposed weights. Others keep torch's grouped product.
    """
    for module in model.modules():
        if is_silu_gated(module):
            config: Any = module.config
            config._experts_implementation = BY_EXPERT


register_experts(BY_EXPERT, run_by_expert)
