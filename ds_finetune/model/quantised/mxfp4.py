"""Experts' weights in MXFP4 as published with gpt-oss: E2M1 numbers of four bits, 32 to a scale that is a power of two.

The format is that of OCP's Microscaling Formats 1.0, in the layout that transformers 5.23 reads
(integrations/mxfp4.py:_convert_moe_packed_tensors). A tensor `X` [experts, inputs, outputs] of the model is published
as bytes `X_blocks` [experts, outputs, inputs / 32, 16] and exponents `X_scales` [experts, outputs, inputs / 32]. The
lower half of a byte is the earlier number.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ds_finetune.errors import ModelError
from ds_finetune.model.quantised.fp8 import BYTE_SCALE, SCALE, next_power_of_two
from ds_finetune.model.weights.safetensors_file import Shape, StoredTensor

GROUP = 32
"""Number of MXFP4 values with a common scale."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes that turn a weight's name into the names of the tensors with its packed bytes and its MXFP4 scales."""
QUANT_METHOD = "mxfp4"
"""Value of `quant_method` in gpt-oss' config.json."""
_HALF_BYTE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_HALF_BYTE, -_HALF_BYTE])
_PAIRS = (
    torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], dim=1).contiguous().view(torch.int64)[:, 0].numpy()
)
"""The two E2M1 numbers in each byte value, as bits of two fp32 numbers in an int64."""
_EXPONENTS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
"""The scale that each exponent byte means: 2^(byte - 127); NaN for 255."""
_BYTES = 2**18
"""Number of bytes that `dequantise` converts at a time: numpy's lookup needs an index of eight bytes for each."""
_BYTES_OF_GROUP = GROUP // 2
_DIMENSIONS = 4
_SHOWN = 10


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise bytes [..., groups, 16] with exponents [..., groups], both uint8, to fp32 [..., groups x 32].

    Every result is exact in bf16 too: it has two significant bits, and its exponent is in bf16's range.
    """
    flat = np.ascontiguousarray(blocks.numpy()).reshape(-1)
    pairs = np.empty(flat.size, dtype=np.int64)
    for begin in range(0, flat.size, _BYTES):
        np.take(_PAIRS, flat[begin : begin + _BYTES], out=pairs[begin : begin + _BYTES], mode="clip")
    values = torch.from_numpy(pairs).view(torch.float32).view(*scales.shape, GROUP)
    values *= _EXPONENTS[scales.int()][..., None]
    return values.flatten(-2)


class LastExpert(threading.local):
    """Cache of the expert that a thread read last, because successive reads are often of one expert."""

    def __init__(self) -> None:
        self._of: tuple[StoredTensor, int] | None = None
        self._blocks = self._scales = torch.empty(0, dtype=torch.uint8)

    def read(self, blocks: StoredTensor, scales: StoredTensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read one expert's packed bytes [outputs, groups, 16] and scales [outputs, groups]."""
        if self._of != (blocks, expert):
            self._of = None
            self._blocks, self._scales = (part.rows(expert, expert + 1)[0] for part in (blocks, scales))
            self._of = (blocks, expert)
        return self._blocks, self._scales


@dataclass(frozen=True)
class Mxfp4Experts:
    """Weights of a layer's experts [experts, inputs, outputs], stored in MXFP4. Reading them dequantises to fp32."""

    blocks: StoredTensor
    scales: StoredTensor
    last: LastExpert
    """Cache that all weights of a folder share, so that each thread holds the bytes of only one expert."""

    @property
    def shape(self) -> Shape:
        """Shape of the experts' weights in the model."""
        experts, outputs, groups, _ = self.blocks.shape
        return (experts, groups * GROUP, outputs)

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Read elements `start` to `start + numel` of the flattened (row-major) tensor, 1-D."""
        _, inputs, outputs = self.shape
        first, last = start // outputs, -(-(start + numel) // outputs)
        parts = [
            self._part(e, slice(max(first - e * inputs, 0), min(last - e * inputs, inputs)), slice(0, outputs))
            for e in range(first // inputs, -(-last // inputs))
        ]
        return torch.cat([part.reshape(-1) for part in parts])[start - first * outputs :][:numel]

    def rows(self, first: int, last: int, within: tuple[slice, ...] = ()) -> torch.Tensor:
        """Read experts `first` to `last`, [experts, inputs, outputs]. `within` selects ranges of inputs and outputs."""
        full_slices = tuple(slice(0, size) for size in self.shape[1:])
        inputs, outputs = within + full_slices[len(within) :]
        parts = [self._part(e, inputs, outputs) for e in range(first, last)]
        return torch.stack(parts) if parts else torch.empty(0, *self.shape[1:])

    def _part(self, expert: int, inputs: slice, outputs: slice) -> torch.Tensor:
        blocks, scales = self.last.read(self.blocks, self.scales, expert)
        first, last = inputs.start // GROUP, -(-inputs.stop // GROUP)
        values = dequantise(blocks[outputs, first:last], scales[outputs, first:last])
        return values[:, inputs.start - first * GROUP : inputs.stop - first * GROUP].T


def find_experts(stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, Mxfp4Experts]:
    """Find the MXFP4 weights of `folder`. Returns them by their names in the model.

    ModelError if packed bytes or scales are missing, or their shapes or dtypes do not match.
    """
    names = {
        key.removesuffix(suffix)
        for key, tensor in stored.items()
        for suffix in (BLOCKS, SCALES)
        if key.endswith(suffix) and tensor.dtype == torch.uint8
    }
    incomplete = sorted(name for name in names if name + BLOCKS not in stored or name + SCALES not in stored)
    if incomplete:
        raise ModelError(
            f"{folder} holds {len(incomplete)} weights in MXFP4 without `{BLOCKS}` or `{SCALES}`: "
            f"{', '.join(incomplete[:_SHOWN])}",
            hint="download it again, or use a bf16 copy of the model",
        )
    for name in sorted(names):
        blocks, scales = stored[name + BLOCKS], stored[name + SCALES]
        fits = len(blocks.shape) == _DIMENSIONS and blocks.shape == (*scales.shape, _BYTES_OF_GROUP)
        if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
            raise ModelError(
                f"{folder}: `{name}` has blocks {blocks.shape} of {blocks.dtype} and scales {scales.shape} of "
                f"{scales.dtype}, not [experts, outputs, groups, {_BYTES_OF_GROUP}] and [experts, outputs, groups] "
                "of torch.uint8",
                hint="only MXFP4 as in gpt-oss is supported; use a bf16 copy of the model",
            )
        if name in stored:
            raise ModelError(f"{folder} has `{name}` twice, once in MXFP4", hint="remove one of the two tensors")
    last = LastExpert()
    return {name: Mxfp4Experts(stored[name + BLOCKS], stored[name + SCALES], last) for name in sorted(names)}


PACKED = torch.int8
_PER_BYTE = 2
_READ = "only FP4 as in DeepSeek-V4-Flash is supported; use a bf16 copy of the model"
_BETWEEN = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Midpoints between neighbouring E2M1 numbers; index i is between numbers i and i + 1."""


def packed_shapes(shape: Shape) -> tuple[Shape, Shape]:
    """Shapes of the packed bytes and of the scales of an FP4 matrix of `shape`."""
    rows, columns = shape
    return (rows, columns // _PER_BYTE), (rows, columns // GROUP)


def pack(
    values: torch.Tensor, like: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Quantise [rows, columns] to FP4: packed bytes (int8), exponents of scales, and number of groups kept from `like`.

    A group's scale is the smallest power of two that brings the group's largest magnitude to at most 6. Midpoints
    between E2M1 numbers round to even. If a group equals the dequantised group of `like`, it keeps bytes and scale of
    `like`, because different bytes and scales may represent equal numbers.
    """
    groups = values.float().view(len(values), -1, GROUP)
    scale = next_power_of_two((groups.abs().amax(-1) / _HALF_BYTE[-1]).clamp_(min=torch.finfo(torch.float32).tiny))
    sizes = (groups / scale[..., None]).abs()
    lower, upper = torch.bucketize(sizes, _BETWEEN), torch.bucketize(sizes, _BETWEEN, right=True)
    codes = torch.where(lower % 2 == 0, lower, upper) + 8 * groups.signbit()
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    exponents, is_kept = scale.to(BYTE_SCALE).view(torch.uint8), torch.zeros_like(scale, dtype=torch.bool)
    if like is not None:
        old, of_old = like[0].view(torch.uint8).view_as(packed), like[1].view(torch.uint8)
        is_kept = (dequantise(old, of_old).view_as(groups) == groups).all(-1)
        packed, exponents = torch.where(is_kept[..., None], old, packed), torch.where(is_kept, of_old, exponents)
    return packed.flatten(-2).view(PACKED), exponents.view(BYTE_SCALE), int(is_kept.sum())


@dataclass(frozen=True)
class Fp4Matrix:
    """A matrix [rows, columns] in FP4, stored as `packed` bytes and `scales`. Reading it dequantises to fp32."""

    packed: StoredTensor
    scales: StoredTensor

    @property
    def shape(self) -> Shape:
        """Numbers of rows and columns of the matrix in the model."""
        rows, width = self.packed.shape
        return (rows, width * _PER_BYTE)

    def stored_rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the packed bytes and the scales of rows `first` to `last` of the matrix."""
        return self.packed.rows(first, last), self.scales.rows(first, last)

    def rows(self, first: int, last: int, within: tuple[slice, ...] = ()) -> torch.Tensor:
        """Read rows `first` to `last`, [rows, columns]. `within` selects a range of columns."""
        blocks = self.packed.rows(first, last).view(torch.uint8).view(last - first, -1, GROUP // _PER_BYTE)
        return dequantise(blocks, self.scales.rows(first, last).view(torch.uint8))[(slice(None), *within)]


def find_matrices(stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, Fp4Matrix]:
    """Find the FP4 matrices of `folder`, by name: int8 tensors that have scales.

    ModelError if shape or dtype of scales do not match.
    """
    names = [key for key, tensor in stored.items() if tensor.dtype == PACKED and key + SCALE in stored]
    for name in names:
        packed, scales = stored[name], stored[name + SCALE]
        columns = packed.shape[-1] * _PER_BYTE
        if columns % GROUP:
            raise ModelError(
                f"{folder}: `{name}` has {columns} columns in FP4, no multiple of the group size {GROUP}",
                hint=_READ,
            )
        groups = (packed.shape[0], columns // GROUP)
        if scales.shape != groups or scales.dtype != BYTE_SCALE:
            raise ModelError(
                f"{folder}: `{name}` {packed.shape} of {packed.dtype} has scales {scales.shape} of {scales.dtype}, not "
                f"{groups} of {BYTE_SCALE}",
                hint=_READ,
            )
    return {name: Fp4Matrix(stored[name], stored[name + SCALE]) for name in names}
