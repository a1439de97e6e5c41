"""Products of matrices without autograd, for functions that have a backward pass of their own: oneDNN's in fp32 where
they are faster on this CPU, torch's elsewhere.
"""

from collections.abc import Callable

import torch

from ds_finetune.patches.torch_onednn import choose_fp32_products, multiply_by_onednn

_SMALLEST = 2**20
"""Multiplications from which a product goes to oneDNN: below, the call costs more than it saves."""
_BLOCK_NUMBERS = 2**22
"""Numbers of a product that oneDNN computes at a time, 16 MiB: they stay in the caches and in memory that malloc keeps.
Fresh pages for the product of [1024, 256] and [256, 102400] take as long as half of it.
"""
_VECTOR = 16
ROW_MULTIPLE = 8
"""Multiple to which rows are padded where their number changes from step to step: oneDNN compiles a product for each
new shape, which takes longer than a small product (0.3 ms; [96, 256] x [256, 352] in fp32 takes 0.08).
"""


def row_multiple(rows: torch.Tensor) -> int:
    """The multiple to which products by oneDNN pad `rows`; 1 for those of MKL."""
    return ROW_MULTIPLE if rows.dtype.itemsize < 4 or is_for_onednn(rows) else 1


def is_for_onednn(left: torch.Tensor) -> bool:
    """Whether large products of `left` are oneDNN's by a call of this program."""
    return left.dtype == torch.float32 and left.device.type == "cpu" and choose_fp32_products().is_onednn


def multiplication(left: torch.Tensor) -> Callable[..., object]:
    """The function that multiplies matrices like `left`, called as `torch.mm(left, right, out=out)` is."""
    return _multiply_by_onednn_into if is_for_onednn(left) else torch.mm


def _multiply_by_onednn_into(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
    if left.shape[0] * left.shape[1] * right.shape[1] < _SMALLEST:
        torch.mm(left, right, out=out)
        return
    width = _block_width(len(left))
    if width >= right.shape[1]:
        out.copy_(multiply_by_onednn(left, right))
        return
    for start in range(0, right.shape[1], width):
        out[:, start : start + width].copy_(multiply_by_onednn(left, right[:, start : start + width]))


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left` [rows, inner] @ `right` [inner, columns] to the fp32 `total` [rows, columns], where `left` is the
    transpose of a contiguous matrix or of rows of one.
    """
    if left.dtype != total.dtype:
        _add_product_of_16_bits(total, left, right)
    elif left.shape[0] * left.shape[1] * right.shape[1] < _SMALLEST or not is_for_onednn(left):
        torch.addmm(total, left, right, out=total)
    else:
        # Transposed, with rows of `left` in the place of a weight: oneDNN is faster so, and they may be many.
        width, across = _block_width(len(right)), right.T.contiguous()
        for start in range(0, len(left), width):
            total[start : start + width].add_(multiply_by_onednn(across, left[start : start + width].T).T)


def _block_width(rows: int) -> int:
    """Columns of a block of a product of so many rows: a multiple of a vector's numbers, as oneDNN splits them."""
    return max(_VECTOR, _BLOCK_NUMBERS // rows // _VECTOR * _VECTOR)


def _add_product_of_16_bits(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.device.type == "cuda":
        # Products of 16-bit numbers are added in fp32: no product is rounded and written before it is added.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        # torch 2.13 has products of 16-bit numbers in fp32 on GPUs alone.
        total += left @ right
