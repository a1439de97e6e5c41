"""Writes safetensors files, in any order of tensors and from several threads.

Headers and offsets follow from names, shapes and dtypes, which are known before the first write. So no more is held in
memory than the data of one write.
"""

import json
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import xxhash

from ds_finetune.config.units import MIB
from ds_finetune.errors import ExportError
from ds_finetune.export.output_folder import as_output_errors
from ds_finetune.export.verify.record import Digest
from ds_finetune.model.build.hub_folder import INDEX
from ds_finetune.model.weights.safetensors_file import encode_header

PIECE_NUMEL = 2**22
"""Number of elements of a tensor that are read, cast, compared or written at a time: 16 MiB of fp32."""
_SHOWN = 5
_RELEASE_BYTES = 64 * MIB
"""Number of bytes written to a weight file before its pages are dropped from the page cache."""


@dataclass(frozen=True)
class HubTensor:
    """Published name, shape and dtype of a tensor to write."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.numel * self.dtype.itemsize


Shards = Mapping[str, Sequence[HubTensor]]
"""Tensors of each weight file to write, by file name."""


def plan_shards(tensors: Iterable[HubTensor], max_shard_bytes: int) -> Shards:
    """Distribute tensors to weight files of at most `max_shard_bytes`, in order; only a larger tensor exceeds it."""
    files: list[list[HubTensor]] = []
    free_bytes = 0
    for tensor in tensors:
        if not files or tensor.num_bytes > free_bytes:
            files.append([])
            free_bytes = max_shard_bytes
        files[-1].append(tensor)
        free_bytes -= tensor.num_bytes
    count = len(files)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return dict(zip(["model.safetensors"] if count == 1 else names, files, strict=True))


@dataclass
class _TensorProgress:
    """Position of a tensor in its file, and the ranges of its elements written so far."""

    tensor: HubTensor
    file: "_ShardFile"
    begin_byte: int
    written: list[tuple[int, int, int]] = field(default_factory=list)
    """Written ranges of a tensor: first element, last element + 1, and the xxh3 digest of the bytes between."""

    def is_complete(self) -> bool:
        numel = self.tensor.numel
        bounds = [(0, 0, 0), *sorted(self.written), (numel, numel, 0)]
        return all(before[1] == after[0] for before, after in pairwise(bounds))


class ShardWriter:
    """Writes the safetensors files `shards` to `folder`. Several threads may call `write`, in any order of tensors.

    A file is created with its header at its first write, and flushed and closed when it is full, so that few files are
    open at a time. If several tensors are stored as one, `names` maps the name of each to the name of the stored tensor
    and the index in it at which the tensor begins.
    """

    def __init__(self, folder: Path, shards: Shards, names: Mapping[str, tuple[str, int]] | None = None) -> None:
        self._folder, self._shards, self._names = folder, shards, names or {}
        self._lock = threading.Lock()
        self._progress: dict[str, _TensorProgress] = {}
        self._files = [_ShardFile(folder / name, tensors) for name, tensors in shards.items()]
        for file in self._files:
            for tensor, begin in file.layout:
                # The shape [0] is ZeRO-3's placeholder for a parameter that was not gathered. [0, width] is valid: a
                # model without shared experts has it.
                if tensor.shape == (0,):
                    raise ExportError(
                        f"tensor `{tensor.key}` has shape {tensor.shape} and so no elements",
                        hint="the source folder is damaged: use another one",
                    )
                assert tensor.key not in self._progress, tensor.key
                self._progress[tensor.key] = _TensorProgress(tensor, file, begin)

    def write(self, key: str, start: int, flat: torch.Tensor) -> None:
        """Write `flat` as the elements of the flattened tensor `key` from element `start` on. `flat` is 1-D,
        contiguous, on the CPU and of the planned dtype. OutputError if the disk is full.
        """
        key, first = self._names.get(key, (key, 0))
        progress, start = self._progress[key], first + start
        tensor, file, size = progress.tensor, progress.file, flat.dtype.itemsize
        assert flat.dim() == 1, (key, flat.shape)
        assert flat.dtype == tensor.dtype, (key, flat.dtype, tensor.dtype)
        assert start + flat.numel() <= tensor.numel, (key, start, flat.numel(), tensor.shape)
        data = flat.view(torch.uint8).numpy().data
        with as_output_errors(self._folder):
            with self._lock:
                file.open()
            file.write(data, progress.begin_byte + start * size)
            digest = xxhash.xxh3_64_intdigest(data)
            with self._lock:
                progress.written.append((start, start + flat.numel(), digest))
                is_full = file.count(flat.numel() * size)
            if is_full:
                file.close(is_full=True)

    def finish(self) -> None:
        """Write the index of tensors if there are several files. ExportError if not every tensor was written once."""
        incomplete = [key for key, progress in self._progress.items() if not progress.is_complete()]
        if incomplete:
            shown = ", ".join(
                f"`{key}` ({sum(stop - start for start, stop, _ in self._progress[key].written)} of "
                f"{self._progress[key].tensor.numel} elements)"
                for key in incomplete[:_SHOWN]
            )
            raise ExportError(
                f"{len(incomplete)} of {len(self._progress)} tensors were not written exactly once: {shown}",
                hint="please report this",
            )
        if len(self._shards) > 1:
            weight_map = {tensor.key: name for name, tensors in self._shards.items() for tensor in tensors}
            index = {
                "metadata": {"total_size": sum(progress.tensor.num_bytes for progress in self._progress.values())},
                "weight_map": dict(sorted(weight_map.items())),
            }
            with as_output_errors(self._folder):
                (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def digests(self) -> dict[str, Digest]:
        """Digests of the data that was written, by tensor name."""
        return {
            key: Digest.of((stop - start, digest) for start, stop, digest in sorted(progress.written))
            for key, progress in self._progress.items()
        }

    def close(self) -> None:
        """Close weight files that an error left open."""
        for file in self._files:
            file.close()


class _ShardFile:
    """One safetensors file: 8 bytes with the header's length, the JSON header padded to 8 bytes, data without gaps."""

    def __init__(self, path: Path, tensors: Iterable[HubTensor]) -> None:
        self._path, self._unreleased = path, 0
        self._descriptor: int | None = None
        # Tensors are sorted by size of the dtype, which keeps each one aligned for readers that map the file.
        ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
        self._missing = sum(tensor.num_bytes for tensor in ordered)
        entries = ((tensor.key, tensor.dtype, tensor.shape) for tensor in ordered)
        self._header, begins = encode_header(entries, {"format": "pt"})
        self.layout = list(zip(ordered, begins, strict=True))
        """Each tensor of the file with the byte offset of its data."""

    def open(self) -> None:
        if self._descriptor is None:
            assert self._missing, self._path
            self._descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            os.ftruncate(self._descriptor, len(self._header) + self._missing)
            self.write(memoryview(self._header), 0)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at byte `offset`, even if the system splits the write. From time to time, pages that are
        already on the disk are dropped from the page cache. A full cache would slow down all other programs.
        """
        assert self._descriptor is not None
        self._unreleased += len(data)
        while data:
            done = os.pwrite(self._descriptor, data, offset)
            data, offset = data[done:], offset + done
        if self._unreleased >= _RELEASE_BYTES:
            self._unreleased = 0
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def count(self, num_bytes: int) -> bool:
        self._missing -= num_bytes
        return self._missing == 0

    def close(self, *, is_full: bool = False) -> None:
        """Close the weight file if it is open. A complete file is first flushed to the disk (fsync)."""
        if self._descriptor is not None:
            if is_full:
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
