"""Reads files of `torch.save` without running code in them: values through an allow-list, tensors as byte offsets in
the file.
"""

import pickle
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ds_finetune.errors import ExportError
from ds_finetune.model.weights.safetensors_file import DataFile


class Inert:
    """Replaces an object of another program's class; ignores its state."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class InertInt(int):
    """Replaces a member of an integer enumeration, e.g. `ZeroStageEnum`."""


def load_values(path: Path, stand_ins: Sequence[tuple[Any, str]]) -> dict[str, Any]:
    """The dictionary in the file `path`, with tensors on the meta device; `span_of` finds their data in the file.

    Only classes of torch's own allow-list are made, and those of `stand_ins`: pairs of an inert class and the name in
    the pickle that it is made for. ExportError for any other name; nothing of the pickle is executed then.
    """
    try:
        with safe_globals(list(stand_ins)):
            unknown = sorted(get_unsafe_globals_in_checkpoint(str(path)))
            if unknown:
                raise ExportError(
                    f"{path} holds objects of {len(unknown)} unknown kinds: {', '.join(unknown)}",
                    hint="they could run code and were not loaded; export from a checkpoint that DeepSpeed alone wrote",
                )
            tree = torch.load(path, map_location="meta", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as broken:
        reason = str(broken).splitlines()[0]
        raise ExportError(
            f"{path} cannot be read: {reason}",
            hint="the file is damaged, or torch.save did not write it; use an older checkpoint",
        ) from broken
    if not isinstance(tree, dict):
        raise ExportError(
            f"{path} holds a {type(tree).__name__}, not a dictionary", hint="name a folder that DeepSpeed wrote"
        )
    return tree


@dataclass(frozen=True)
class FileSpan:
    """`numel` consecutive elements of `dtype` in a file, from byte `offset`."""

    file: DataFile
    offset: int
    numel: int
    dtype: torch.dtype

    def read_into(self, view: memoryview, start: int) -> None:
        """Fill the bytes of `view` with the elements from `start`; ExportError where the file is too short."""
        try:
            self.file.read_into(view, self.offset + start * self.dtype.itemsize)
        except EOFError as short:
            raise ExportError(f"{short}", hint="the file is damaged; use an older checkpoint") from short


def span_of(tensor: torch.Tensor, file: DataFile) -> FileSpan:
    """The data, in `file`, of a tensor that `load_values(file.path)` gave; ExportError where it is not contiguous.

    The storage of a tensor loaded to the meta device has its offset in the file (torch 2.13, serialization.py:2098).
    """
    if not tensor.is_contiguous() or not tensor.dtype.is_floating_point:
        raise ExportError(
            f"{file.path} holds a tensor of {tensor.dtype}, shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            hint="only contiguous tensors of a floating dtype can be exported",
        )
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None, file.path
    return FileSpan(file, offset + int(tensor.storage_offset()) * tensor.itemsize, tensor.numel(), tensor.dtype)


class FlatVector:
    """Runs of one dtype, also of several files, joined to one vector of `numel` elements."""

    def __init__(self, runs: Sequence[FileSpan]) -> None:
        self._runs = [run for run in runs if run.numel]
        self._starts = list(accumulate((run.numel for run in self._runs), initial=0))
        self.numel = self._starts[-1]
        self.dtype = self._runs[0].dtype if self._runs else torch.float32
        assert all(run.dtype == self.dtype for run in self._runs)

    def read_into(self, view: memoryview, start: int) -> None:
        """Fill the bytes of `view` with the elements from `start`."""
        size = self.dtype.itemsize
        assert start >= 0
        assert start + len(view) // size <= self.numel
        index = bisect_right(self._starts, start) - 1
        while view:
            run, skipped = self._runs[index], start - self._starts[index]
            count = min(run.numel - skipped, len(view) // size)
            run.read_into(view[: count * size], skipped)
            view, start, index = view[count * size :], start + count, index + 1


@dataclass(frozen=True)
class Slices:
    """A tensor of `numel` elements in slices of `share` elements: slice i begins at element `offset` of `vectors[i]`.

    The last slice may be padded.
    """

    vectors: Sequence[FlatVector]
    offset: int
    share: int
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored elements."""
        return self.vectors[0].dtype

    def read_into(self, view: memoryview, start: int) -> None:
        """Fill the bytes of `view` with the tensor's elements from `start`."""
        size = self.dtype.itemsize
        while view:
            index, skipped = divmod(start, self.share)
            count = min(self.share - skipped, len(view) // size)
            self.vectors[index].read_into(view[: count * size], self.offset + skipped)
            view, start = view[count * size :], start + count
