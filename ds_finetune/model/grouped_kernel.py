"""Triton kernels for grouped products of rows, sorted by expert, with experts' weights. They serve GPUs and dtypes for
which torch has no kernel: torch would multiply expert by expert, and the host would wait for the numbers of rows.

The ends of experts' rows stay on the device. The kernel starts as many programs as there could be tiles. Each finds its
tile's expert from the ends, and returns if there is no such tile. Products are summed in fp32. The import needs triton.
"""

# ruff: noqa: ANN001, ANN202, N803, PLR0913 - kernels of Triton

from typing import Any

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS, _DEPTH = 64, 128, 32
"""Rows and columns of an output tile, and number of summands loaded at a time. A load has 12 KiB of 16-bit numbers.
Three loads (Triton's pipeline stages) fit into the shared memory of every GPU with compute capability 8.x.
"""


@triton.jit  # type: ignore[untyped-decorator]
def _tile(ends, number, experts, PADDED: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Expert of tile `number` (PADDED beyond the last tile), the tile's first row, and the end of the expert's rows."""
    index = tl.arange(0, PADDED)
    is_expert = index < experts
    stop = tl.load(ends + index, mask=is_expert, other=0)
    start = tl.load(ends + index - 1, mask=is_expert & (index > 0), other=0)
    tiles = tl.where(is_expert, (stop - start + ROWS - 1) // ROWS, 0)
    after = tl.cumsum(tiles, 0)
    expert = tl.sum((after <= number).to(tl.int32), 0)
    first = tl.sum(tl.where(index == expert, start + (number - after + tiles) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(index == expert, stop, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _product_kernel(  # type: ignore[no-untyped-def]
    rows,
    weight,
    out,
    ends,
    experts,
    depth,
    columns,
    expert_step,
    depth_step,
    column_step,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Triton kernel: multiply a tile of `rows` [rows, depth] with its expert's `weight` [experts, depth, columns]."""
    expert, first, end = _tile(ends, tl.program_id(0), experts, PADDED, ROWS)
    if expert < PADDED:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        own = weight + expert.to(tl.int64) * expert_step
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, depth, DEPTH):
            inner = begin + tl.arange(0, DEPTH)
            is_row, is_inner, is_column = row < end, inner < depth, column < columns
            left = tl.load(rows + row[:, None] * depth + inner[None, :], is_row[:, None] & is_inner[None, :], 0.0)
            places = inner[:, None].to(tl.int64) * depth_step + column[None, :].to(tl.int64) * column_step
            right = tl.load(own + places, is_inner[:, None] & is_column[None, :], 0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        places = row[:, None] * columns + column[None, :]
        is_kept = (row < end)[:, None] & (column < columns)[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), is_kept)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    rows,
    grad,
    out,
    ends,
    depth,
    columns,
    expert_step,
    depth_step,
    column_step,
    TALL: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Triton kernel: compute a tile of an expert's weight gradient: [rows, depth].T @ [rows, columns] of its rows."""
    expert = tl.program_id(2)
    end = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, expert > 0, 0)
    place = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((TALL, COLUMNS), tl.float32)
    for begin in range(start, end, DEPTH):
        row = (begin + tl.arange(0, DEPTH)).to(tl.int64)
        is_row, is_place, is_column = row < end, place < depth, column < columns
        left = tl.load(rows + row[None, :] * depth + place[:, None], is_row[None, :] & is_place[:, None], 0.0)
        right = tl.load(grad + row[:, None] * columns + column[None, :], is_row[:, None] & is_column[None, :], 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    places = place[:, None].to(tl.int64) * depth_step + column[None, :].to(tl.int64) * column_step
    is_kept = (place < depth)[:, None] & (column < columns)[None, :]
    tl.store(out + expert.to(tl.int64) * expert_step + places, total.to(out.dtype.element_ty), is_kept)


@torch.library.custom_op("ds_finetune::grouped_product", mutates_args=())
def grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply `rows` [rows, in], sorted by expert, with their experts' `weight` [experts, in, out]; [rows, out].

    Expert i's rows end at `ends[i]`, int32 [experts] on the same device; the last end is the number of rows.
    """
    (number, depth), (experts, _, columns) = rows.shape, weight.shape
    rows, out = rows.contiguous(), rows.new_empty(number, columns)
    # This is the maximum number of tiles, because an expert has at most one tile that is not full.
    grid = (triton.cdiv(number, _ROWS) + experts, triton.cdiv(columns, _COLUMNS))
    tiles = {"PADDED": triton.next_power_of_2(experts), "ROWS": _ROWS, "COLUMNS": _COLUMNS, "DEPTH": _DEPTH}
    _product_kernel[grid](rows, weight, out, ends, experts, depth, columns, *weight.stride(), **tiles)
    return out


@torch.library.custom_op("ds_finetune::grouped_gradient", mutates_args=())
def _gradient(rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, grad, out = rows.contiguous(), grad.contiguous(), torch.empty_like(weight)
    experts, depth, columns = weight.shape
    grid = (triton.cdiv(depth, _ROWS), triton.cdiv(columns, _COLUMNS), experts)
    tiles = {"TALL": _ROWS, "COLUMNS": _COLUMNS, "DEPTH": _DEPTH}
    _gradient_kernel[grid](rows, grad, out, ends, depth, columns, *out.stride(), **tiles)
    return out


@grouped_product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@_gradient.register_fake
def _(_: torch.Tensor, __: torch.Tensor, ___: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ANN401
    rows, weight, ends = inputs
    of_rows, of_weight = ctx.needs_input_grad[:2]
    # Only the gradient of the weight needs the rows; both gradients need the weight's shape and strides.
    ctx.save_for_backward(rows if of_weight else None, weight if of_rows or of_weight else None, ends)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
    rows, weight, ends = ctx.saved_tensors
    of_rows = grouped_product(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    return of_rows, _gradient(rows, grad, ends, weight) if ctx.needs_input_grad[1] else None, None


grouped_product.register_autograd(_backward, setup_context=_keep)
