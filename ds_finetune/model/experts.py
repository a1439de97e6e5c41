"""Routed experts on CPUs: one product for each expert, and rows gathered and added up in one pass each."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ds_finetune.patches.transformers_experts import is_silu_gated, register_experts

BY_EXPERT = "ds_finetune_by_expert"
"""Name of this implementation in a model's configuration."""
_BLOCK_NUMBERS = 2**18
"""Outputs of `gate_up` for each thread that are processed together."""


def _row_multiple(rows: torch.Tensor) -> int:
    """The multiple to which the rows of an expert are padded: oneDNN, which multiplies 16-bit numbers, compiles a
    product for each new shape, which takes longer than a small product does.
    """
    return 8 if rows.dtype.itemsize < 4 else 1


class _Routes(NamedTuple):
    """Where the rows of each expert come from: a row is a token at one of the k experts that it chose, or padding."""

    token: torch.Tensor
    """Token of each row, rows sorted by expert, int64 [rows]; the number of tokens for padding."""
    row: torch.Tensor
    """Row of each token's choice, int64 [tokens, k]."""
    sizes: list[int]
    """Rows of each expert, with padding."""

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
    token = order.new_full((int(sizes.sum()),), len(chosen))
    token[place] = order // chosen.shape[1]
    row = torch.empty_like(order)
    row[order] = place
    return _Routes(token, row.view_as(chosen), sizes.tolist())


def _append_zeros(tokens: torch.Tensor) -> torch.Tensor:
    """`tokens` [tokens, columns] and a row of zeros, which padding is gathered from."""
    return torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])


class _Block(NamedTuple):
    """Experts whose rows are processed together."""

    experts: slice
    rows: slice
    sizes: list[int]
    """Rows of each of the experts, with padding."""


def _split_experts(sizes: list[int], columns: int) -> list[_Block]:
    """The experts with `sizes` rows of `columns` numbers in blocks that stay in the caches; one expert at least."""
    most = max(1, torch.get_num_threads() * _BLOCK_NUMBERS // columns)
    blocks: list[_Block] = []
    first, start = 0, 0
    while first < len(sizes):
        last, end = first + 1, start + sizes[first]
        while last < len(sizes) and end + sizes[last] - start <= most:
            end += sizes[last]
            last += 1
        blocks.append(_Block(slice(first, last), slice(start, end), sizes[first:last]))
        first, start = last, end
    return blocks


def _multiply(rows: torch.Tensor, weights: torch.Tensor, sizes: list[int], out: torch.Tensor) -> torch.Tensor:
    """Write the product of each expert's `rows` [rows, in] with its matrix of `weights` [experts, in, out] to `out`
    [rows, out], which is returned.
    """
    for part, weight, product in zip(rows.split(sizes), weights.unbind(), out.split(sizes), strict=True):
        if len(part):
            torch.mm(part, weight, out=product)
    return out


def _weight_gradients(left: torch.Tensor, right: torch.Tensor, sizes: list[int], out: torch.Tensor) -> None:
    """Write `left.T @ right` over each expert's rows to `out` [experts, columns of `left`, columns of `right`]."""
    for a, b, product in zip(left.split(sizes), right.split(sizes), out.unbind(), strict=True):
        if len(a):
            torch.mm(a.T, b, out=product)
        else:
            product.zero_()


class _GatedExperts(torch.autograd.Function):
    """The weighted sum over each token's experts of `down(silu(gate(x)) * up(x))`.

    The weight of a choice is multiplied into what goes into `down`, the narrower side, so that the outputs of the
    experts are neither weighted nor kept for backward: its gradient is the product of that side with its own gradient.
    Experts are processed in blocks, whose rows are gathered when their turn comes.
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
        routes = _sort_by_expert(chosen, len(gate_up), _row_multiple(hidden))
        weights = routes.spread(choice_weights)
        gated = hidden.new_empty(len(weights), gate_up.shape[1])
        out, tokens = hidden.new_empty(len(weights), hidden.shape[1]), _append_zeros(hidden)
        for experts, rows, sizes in _split_experts(routes.sizes, gate_up.shape[1]):
            _multiply(tokens.index_select(0, routes.token[rows]), gate_up[experts].transpose(1, 2), sizes, gated[rows])
            gate, up = _split_gated(gated[rows])
            inner = functional.silu(gate).mul_(up).mul_(weights[rows])
            _multiply(inner, down[experts].transpose(1, 2), sizes, out[rows])
        ctx.save_for_backward(hidden, choice_weights, gate_up, down, gated, *routes[:2])
        ctx.sizes = routes.sizes
        return routes.add_up(out)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        hidden, choice_weights, gate_up, down, gated, token, row = ctx.saved_tensors
        routes, needs = _Routes(token, row, ctx.sizes), ctx.needs_input_grad
        weights, dtype = routes.spread(choice_weights), choice_weights.dtype
        tokens, d_tokens = _append_zeros(hidden), _append_zeros(d_out)
        d_rows = hidden.new_empty(len(weights), hidden.shape[1]) if needs[0] else None
        d_weights = choice_weights.new_empty(len(weights)) if needs[1] else None
        d_gate_up = torch.empty_like(gate_up) if needs[2] else None
        d_down = torch.empty_like(down) if needs[3] else None
        for experts, rows, sizes in _split_experts(routes.sizes, gate_up.shape[1]):
            gate, up = _split_gated(gated[rows])
            active, d_product = functional.silu(gate), d_tokens.index_select(0, token[rows])
            inner = active * up
            d_inner = _multiply(d_product, down[experts], sizes, torch.empty_like(inner))
            if d_weights is not None:
                d_weights[rows] = torch.linalg.vecdot(inner.to(dtype), d_inner.to(dtype))
            if d_down is not None:
                _weight_gradients(d_product, inner.mul_(weights[rows]), sizes, d_down[experts])
            d_gated = _gate_gradient(d_inner.mul_(weights[rows]), gate, up, active)
            if d_gate_up is not None:
                _weight_gradients(d_gated, tokens.index_select(0, token[rows]), sizes, d_gate_up[experts])
            if d_rows is not None:
                _multiply(d_gated, gate_up[experts], sizes, d_rows[rows])
        d_hidden = None if d_rows is None else routes.add_up(d_rows)
        return d_hidden, None if d_weights is None else d_weights[routes.row], d_gate_up, d_down, None


def _split_gated(gated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, [rows, inner] each. The gate is copied: silu of rows with gaps takes three times as long."""
    gate, up = gated.chunk(2, dim=1)
    return gate.contiguous(), up


def _gate_gradient(d_inner: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """The gradient of `[gate, up]` from that of `active * up`, which is overwritten; `active` is silu(gate)."""
    d_gated = gate.new_empty(len(gate), 2 * gate.shape[1])
    d_gate, d_up = d_gated.chunk(2, dim=1)
    torch.mul(d_inner, active, out=d_up)
    d_gate.copy_(torch.ops.aten.silu_backward(d_inner.mul_(up), gate))
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
