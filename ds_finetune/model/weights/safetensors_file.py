"""Reads and writes headers of safetensors files, and reads parts of their tensors. A file has 8 bytes for the length of
the header, the header in JSON, and the tensors' data.
"""

import json
import math
import os
import struct
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from ds_finetune.errors import ModelError
from ds_finetune.model.build.dtypes import SAFETENSORS_DTYPES, SAFETENSORS_NAMES

MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header in bytes, MAX_HEADER_SIZE in safetensors 0.8 (tensor.rs)."""
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
Shape = tuple[int, ...]


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor in a safetensors file. Its row-major data begins at byte `begin` of the file."""

    dtype: torch.dtype
    shape: Shape
    begin: int

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """The tensors of a safetensors file by name, in the order of their data, which must have no gaps."""

    tensors: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]
    end: int
    """Offset in the file, in bytes, at which the tensors' data should end."""


def header_bytes(path: Path) -> int:
    """Size of the header that a safetensors file states; 0 if the file is too short. ValueError if it is too large."""
    with path.open("rb") as file:
        prefix = file.read(_LENGTH.size)
    size: int = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else 0
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {size:,} bytes, more than the {MAX_HEADER_BYTES:,} that safetensors allows")
    return size


def read_header(path: Path, *, is_complete: bool = True) -> Header:
    """Read the header of the safetensors file `path`.

    OSError if it cannot be read. ValueError if it is not a regular file; if the header is invalid, too long
    (`MAX_HEADER_BYTES`) or has unknown dtypes; if tensors overlap or leave gaps; and, with `is_complete`, if the data
    does not end at the end of the file.
    """
    if not path.is_file():
        raise ValueError("it is no regular file")
    size = header_bytes(path)
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        file.seek(_LENGTH.size)
        text = file.read(min(size, file_bytes))
    end = begin = _LENGTH.size + size
    tensors: dict[str, HeaderEntry] = {}
    try:
        tree = json.loads(text)
        metadata = tree.pop(_METADATA, None) or {}
        for name, item in sorted(tree.items(), key=lambda entry: entry[1]["data_offsets"]):
            if item["dtype"] not in SAFETENSORS_DTYPES:
                raise ValueError(f"`{name}` is {item['dtype']}, not one of {', '.join(SAFETENSORS_DTYPES)}")
            tensors[name] = entry = HeaderEntry(SAFETENSORS_DTYPES[item["dtype"]], tuple(item["shape"]), end)
            first, stop = item["data_offsets"]
            is_shape = all(type(side) is int and side >= 0 for side in entry.shape)
            if not is_shape or first != end - begin or stop - first != entry.num_bytes:
                raise ValueError(
                    f"`{name}`, {item['dtype']} {entry.shape}, lies from {first} to {stop} where {end - begin} bytes "
                    "came before"
                )
            end += entry.num_bytes
    except (KeyError, TypeError, AttributeError, RecursionError) as invalid:
        raise ValueError(f"its header is not valid: {invalid!r}") from invalid
    if is_complete and end != file_bytes:
        raise ValueError(f"its tensors end at byte {end}, the file at {file_bytes}")
    return Header(tensors, metadata, end)


def encode_header(
    tensors: Iterable[tuple[str, torch.dtype, Shape]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Encode a file's header for `tensors` (name, dtype, shape). Also returns the byte at which each begins."""
    entries, begins, end = {}, [], 0
    for name, dtype, shape in tensors:
        assert name not in entries, name
        begins.append(end)
        end += math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [begins[-1], end]}
    text = json.dumps({_METADATA: dict(metadata), **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    assert len(text) <= MAX_HEADER_BYTES, len(text)
    head = _LENGTH.pack(len(text)) + text
    return head, [len(head) + begin for begin in begins]


class TensorFile:
    """A file from which threads read parts of tensors. The first read opens the file. It closes with this object."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _descriptor(self) -> int:
        descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def read(self, dtype: torch.dtype, numel: int, offset: int, *, into: "Scratch | None" = None) -> torch.Tensor:
        """Read `numel` elements from byte `offset` on, 1-D, into new memory or the buffer `into`."""
        out = torch.empty(numel, dtype=dtype) if into is None else into.take(numel, dtype)
        view = out.view(torch.uint8).numpy().data
        while view:
            num_read = os.preadv(self._descriptor, [view], offset)
            if not num_read:
                raise ModelError(
                    f"{self.path} ends at byte {offset}, {len(view)} bytes early",
                    hint="another program shortened the file while it was read; copy it again",
                )
            view, offset = view[num_read:], offset + num_read
        return out


class Scratch(threading.local):
    """A buffer for each thread, which grows when needed: allocating memory takes longer than reading into it."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor in this thread's buffer. The thread's next `take` overwrites it."""
        size = numel * dtype.itemsize
        if self._bytes.numel() < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. Its row-major data begins at byte `begin` of `file`."""

    file: TensorFile
    dtype: torch.dtype
    shape: Shape
    begin: int

    def read(self, start: int, numel: int, *, into: Scratch | None = None) -> torch.Tensor:
        """Read elements `start` to `start + numel` of the flattened tensor, 1-D, in the stored dtype."""
        return self.file.read(self.dtype, numel, self.begin + start * self.dtype.itemsize, into=into)

    def rows(self, first: int, last: int, *, into: Scratch | None = None) -> torch.Tensor:
        """Read rows `first` to `last` of the tensor, [rows, ...], in the stored dtype."""
        width = math.prod(self.shape[1:])
        return self.read(first * width, (last - first) * width, into=into).view(last - first, *self.shape[1:])
