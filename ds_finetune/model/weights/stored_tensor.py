"""A tensor of a safetensors file, read in parts."""

import math
import threading
from dataclasses import dataclass

import torch

from ds_finetune.errors import ModelError
from ds_finetune.model.build.data_file import DataFile
from ds_finetune.model.weights.safetensors_header import Shape


class SafetensorsFile(DataFile):
    """One safetensors file."""

    def read(self, dtype: torch.dtype, numel: int, offset: int, *, into: "Scratch | None" = None) -> torch.Tensor:
        """Read `numel` elements from byte `offset`, 1-D, into new memory or the buffer `into`."""
        out = torch.empty(numel, dtype=dtype) if into is None else into.take(numel, dtype)
        view = out.view(torch.uint8).numpy().data
        try:
            self.read_into(view, offset)
        except EOFError as short:
            raise ModelError(f"{short}", hint="it changed while it was read") from short
        return out


class Scratch(threading.local):
    """One growing buffer per thread, as allocating memory takes longer than reading into it."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor over this thread's buffer, valid until its next `take`."""
        size = numel * dtype.itemsize
        if self._bytes.numel() < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype)


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor: row-major, from byte `begin` of `file`."""

    file: SafetensorsFile
    dtype: torch.dtype
    shape: Shape
    begin: int

    def read(self, start: int, numel: int, *, into: Scratch | None = None) -> torch.Tensor:
        """Elements `start` to `start + numel` of the flattened tensor, 1-D, as they are stored."""
        return self.file.read(self.dtype, numel, self.begin + start * self.dtype.itemsize, into=into)

    def rows(self, first: int, last: int, *, into: Scratch | None = None) -> torch.Tensor:
        """Rows `first` to `last`, [rows, ...], as they are stored."""
        width = math.prod(self.shape[1:])
        return self.read(first * width, (last - first) * width, into=into).view(last - first, *self.shape[1:])
