"""Weights in FP4 as DeepSeek-V4-Flash publishes its routed experts: E2M1 numbers of four bits, 32 to a scale.

A matrix `X.weight` [rows, columns] is published as bytes [rows, columns / 2] in int8, of which each has the earlier
number in its lower half, and `X.scale` [rows, columns / 32] in E8M0, as transformers 5.23 reads them
(integrations/finegrained_fp8.py:1116-1175). The numbers are those of MXFP4; only the layout is another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_finetune.errors import ModelError
from ds_finetune.model.quantised.fp8 import BYTE_SCALE, SCALE
from ds_finetune.model.quantised.mxfp4 import GROUP, dequantise
from ds_finetune.model.weights.safetensors_header import Shape
from ds_finetune.model.weights.stored_tensor import StoredTensor

PACKED = torch.int8
_PER_BYTE = 2


@dataclass(frozen=True)
class Fp4Matrix:
    """The weights [rows, columns] that `packed` and `scales` hold; they are dequantised to fp32."""

    packed: StoredTensor
    scales: StoredTensor

    @property
    def shape(self) -> Shape:
        """Rows and columns."""
        rows, width = self.packed.shape
        return (rows, width * _PER_BYTE)

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the row-major flattened matrix, 1-D; reads whole rows."""
        width = self.shape[1]
        first, last = start // width, -(-(start + numel) // width)
        return self.rows(first, last).view(-1)[start - first * width :][:numel]

    def rows(self, first: int, last: int, within: tuple[slice, ...] = ()) -> torch.Tensor:
        """Rows `first` to `last`, [rows, columns]; with `within` some consecutive columns."""
        blocks = self.packed.rows(first, last).view(torch.uint8).view(last - first, -1, GROUP // _PER_BYTE)
        return dequantise(blocks, self.scales.rows(first, last).view(torch.uint8))[(slice(None), *within)]


def find_matrices(stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, Fp4Matrix]:
    """The matrices of `folder` in FP4 by name: int8 with scales.

    ModelError where the shape or dtype of the scales does not fit.
    """
    names = [key for key, tensor in stored.items() if tensor.dtype == PACKED and key + SCALE in stored]
    for name in names:
        packed, scales = stored[name], stored[name + SCALE]
        groups = (packed.shape[0], packed.shape[-1] * _PER_BYTE // GROUP)
        if packed.shape[-1] * _PER_BYTE % GROUP or scales.shape != groups or scales.dtype != BYTE_SCALE:
            raise ModelError(
                f"{folder}: `{name}` {packed.shape} of {packed.dtype} has scales {scales.shape} of {scales.dtype}, not "
                f"{groups} of {BYTE_SCALE}",
                hint="the FP4 of DeepSeek-V4-Flash is read; give a bf16 copy",
            )
    return {name: Fp4Matrix(stored[name], stored[name + SCALE]) for name in names}
