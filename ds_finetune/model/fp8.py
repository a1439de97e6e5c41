"""Weights in FP8 as DeepSeek-V3 and R1 publish them: E4M3 values and one fp32 scale for each block of 128 x 128.

The format is that of DeepSeek-V3's README_WEIGHTS.md: `weight_scale_inv` is what a block is multiplied with, and a last
block that the tensor does not fill counts as filled with zeros.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ds_finetune.errors import FinetuneError
from ds_finetune.families.family import Family

BLOCK = 128
"""Rows and columns of a block."""
FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"
"""What the name of a scale adds to that of its weight."""
QUANTIZATION_CONFIG: Mapping[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
"""`quantization_config` of the config.json published with DeepSeek-V3 and R1."""
_LARGEST = 448.0
"""Largest number of E4M3; a block's scale maps its largest value to it."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_NUMBERS = torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()
"""What each byte is: looked up four times faster than torch 2.13 casts on a CPU."""
_ROWS = 16
"""Rows that are looked up at a time, which divides a block; numpy makes eight bytes of each index."""


def is_quantised(key: str, shape: tuple[int, ...], family: Family) -> bool:
    """Whether `family` is published with `key` in FP8; embeddings, head, norms, routers and biases never are."""
    matrix = 2
    return len(shape) == matrix and family.fp8_linear is not None and re.search(family.fp8_linear, key) is not None


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight [rows, columns]: one for each block, also for one that is not full."""
    return tuple(-(-size // BLOCK) for size in shape)


def dequantise(values: torch.Tensor, scale: torch.Tensor, *, row: int = 0, column: int = 0) -> torch.Tensor:
    """`values` [rows, columns] in FP8, whose first element is (`row`, `column`) of its tensor, as fp32.

    `scale` holds those of the blocks that are met, from the first one on: [block rows, block columns].
    """
    out, numbers = torch.empty(values.shape), values.view(torch.uint8).numpy()
    of_column = (torch.arange(values.shape[1]) + column % BLOCK) // BLOCK
    for begin, end in pairwise([0, *range(_ROWS - row % _ROWS, len(out), _ROWS), len(out)]):
        part = out[begin:end]
        np.take(_NUMBERS, numbers[begin:end], out=part.numpy(), mode="clip")
        part *= scale[(row % BLOCK + begin) // BLOCK, of_column]
    return out


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of blocks, [at most 128 rows, columns] in fp32, as FP8 of that shape and fp32 scales [block columns].

    A block's scale is its largest magnitude / 448, at least the smallest normal number, so that a block of zeros has
    one too.
    Quotients are at most 448 (1 + 2^-22), which the cast rounds to 448.
    """
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    scale = (padded.abs().amax(dim=(0, 2)) / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    return (padded / scale[None, :, None]).to(FP8).view(rows, -1)[:, :columns], scale


def quantise_like(
    values: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantise`, and which blocks kept what they were: `stored` of `scale` [block columns] where `values` are that
    multiplied out.

    Multiplied out as fp32, or that cast to bf16 or fp16; one of them, all over a block. Whatever made the scale,
    such a block gets its bytes back, which `quantise` alone gives only where the scale is that of bf16 numbers.
    """
    made, made_scale = quantise(values)
    plain = dequantise(stored, scale[None])
    kept = torch.zeros(len(scale), dtype=torch.bool)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        differ = torch.nn.functional.pad(values != plain.to(dtype).float(), (0, -values.shape[1] % BLOCK))
        kept |= ~differ.view(len(values), -1, BLOCK).any(2).any(0)
    spread = kept.repeat_interleave(BLOCK)[: values.shape[1]]
    return (
        torch.where(spread, stored.view(torch.uint8), made.view(torch.uint8)).view(FP8),
        torch.where(kept, scale, made_scale),
        kept,
    )


def check_readable(given: Any, label: str, error: type[FinetuneError]) -> None:  # noqa: ANN401 - whatever a config.json holds
    """`error` where the `quantization_config` that `label` gives is not the block format that is read here."""
    tree = given if isinstance(given, Mapping) else {}
    read = {key: tree.get(key, QUANTIZATION_CONFIG[key]) for key in ("fmt", "quant_method", "weight_block_size")}
    if tree.get("quant_method") is None or any(read[key] != QUANTIZATION_CONFIG[key] for key in read):
        raise error(
            f"{label}: weights quantised by {given} are not read",
            hint=f"give a copy in bf16, or in FP8 with weight_block_size [{BLOCK}, {BLOCK}] and quant_method fp8",
        )
