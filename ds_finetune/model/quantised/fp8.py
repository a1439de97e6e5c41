"""Weights in FP8 as published with DeepSeek-V3 and R1: E4M3 values, with an fp32 scale for each block of 128 x 128.

The format is described in DeepSeek-V3's README_WEIGHTS.md: a block is multiplied by its `weight_scale_inv`, and blocks
at the end of a tensor are padded with zeros. UE8M0 scales (DeepSeek-V3.1: `scale_fmt: ue8m0`) are powers of two, stored
as fp32 or as a byte of exponent (F8_E8M0). Other checkpoints have scales in bf16 or fp16.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ds_finetune.families.family import Family

BLOCK = 128
"""Number of rows, and of columns, of an FP8 block."""
FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"
"""Suffix that turns a weight's name into the name of the tensor with its FP8 scales."""
BYTE_SCALE = torch.float8_e8m0fnu
"""Dtype of scales that are powers of two, stored as exponents in a byte."""
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, BYTE_SCALE)
"""Supported dtypes of scales, all of which fp32 represents exactly. Qwen3's FP8 checkpoints have bf16 scales."""
QUANTIZATION_CONFIG: Mapping[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
"""`quantization_config` in the config.json published with DeepSeek-V3 and R1."""
_LARGEST = 448.0
"""Largest E4M3 number, to which a block's scale maps the block's largest magnitude."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_HALF = 0.5
"""Mantissa that torch's `frexp` returns for every power of two."""
_NUMBERS = torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()
"""Value of each of the 256 E4M3 bytes. A table lookup is four times faster than torch 2.13's cast on a CPU."""
_ROWS = 16
"""Number of rows, a divisor of `BLOCK`, dequantised at a time: numpy's table lookup takes an 8-byte index per value."""


def is_quantised(key: str, shape: tuple[int, ...], family: Family) -> bool:
    """Whether `family` publishes the weight `key` in FP8. Embeddings, head, norms, routers and biases never are."""
    matrix = 2
    return len(shape) == matrix and family.fp8_linear is not None and re.search(family.fp8_linear, key) is not None


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an FP8 weight [rows, columns]: one scale for each block, also for incomplete blocks."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantise(values: torch.Tensor, scale: torch.Tensor, *, row: int = 0, column: int = 0) -> torch.Tensor:
    """Dequantise FP8 `values` [rows, columns] to fp32. Their first element is at (`row`, `column`) of the full tensor.

    `scale` [block rows, block columns] begins with the block of this element.
    """
    out, numbers = torch.empty(values.shape), values.view(torch.uint8).numpy()
    of_column = (torch.arange(values.shape[1]) + column % BLOCK) // BLOCK
    for begin, end in pairwise([0, *range(_ROWS - row % _ROWS, len(out), _ROWS), len(out)]):
        part = out[begin:end]
        np.take(_NUMBERS, numbers[begin:end], out=part.numpy(), mode="clip")
        part *= scale[(row % BLOCK + begin) // BLOCK, of_column]
    return out


def quantise(values: torch.Tensor, *, scales_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a row of blocks, fp32 [up to 128 rows, columns], to FP8 values and fp32 scales [block columns].

    A block's scale is its largest magnitude / 448, but at least the smallest normal number, so that it is never zero.
    With `scales_of_two` it is the next power of two. The cast rounds quotients up to 448 (1 + 2^-22) to 448.
    """
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    scale = (padded.abs().amax(dim=(0, 2)) / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    if scales_of_two:
        scale = next_power_of_two(scale)
    return (padded / scale[None, :, None]).to(FP8).view(rows, -1)[:, :columns], scale


def next_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is at least each element. This is exact, unlike exp2(ceil(log2(x)))."""
    mantissa, exponent = scale.frexp()
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == _HALF).to(exponent.dtype))


def quantise_like(
    values: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor, *, scales_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise `values` to FP8, but keep the bytes `stored` and the `scale` [block columns] of blocks that training did
    not change. Returns values, scales and the mask of unchanged blocks.

    A block is unchanged if its values equal the dequantised stored block, in fp32 or rounded to bf16 or fp16. Its
    bytes are kept, because `quantise` may choose another scale than the published one, and so other bytes.
    """
    quantised, new_scale = quantise(values, scales_of_two=scales_of_two)
    plain = dequantise(stored, scale[None])
    is_unchanged = torch.zeros(len(scale), dtype=torch.bool)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        differ = torch.nn.functional.pad(values != plain.to(dtype).float(), (0, -values.shape[1] % BLOCK))
        is_unchanged |= ~differ.view(len(values), -1, BLOCK).any(2).any(0)
    spread = is_unchanged.repeat_interleave(BLOCK)[: values.shape[1]]
    return (
        torch.where(spread, stored.view(torch.uint8), quantised.view(torch.uint8)).view(FP8),
        torch.where(is_unchanged, scale, new_scale),
        is_unchanged,
    )
