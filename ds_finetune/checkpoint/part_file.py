"""A part: the file that one rank writes of a checkpoint.

It is a safetensors file. Its tensors are chunks (chunks.py) of global tensors.
"""

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_finetune.checkpoint.chunks import Chunk
from ds_finetune.errors import CheckpointError
from ds_finetune.model.weights.safetensors_file import HeaderEntry, encode_header, read_header

_MAP_NORESERVE = 0x4000
"""Linux's flag; Python 3.13 and later define it in `mmap`."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of the global tensor `key` of `shape`, stored at byte `begin` of its file."""

    key: str
    shape: tuple[int, ...]
    chunk: Chunk
    dtype: torch.dtype
    begin: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunk."""
        return self.chunk.numel * self.dtype.itemsize


def part_header(stored: Sequence[StoredChunk], extra: Mapping[str, Any]) -> bytes:
    """The header of a part whose chunks follow in order, with `extra` as JSON. `begin` of the chunks is ignored."""
    shapes = {item.key: item.shape for item in stored}
    tensors = (
        (f"{item.key}@{','.join(map(str, item.chunk.offsets))}", item.dtype, item.chunk.sizes) for item in stored
    )
    metadata = {"format": "pt", "shapes": json.dumps(shapes), "extra": json.dumps(dict(extra))}
    return encode_header(tensors, metadata)[0]


class PartFile:
    """A part opened for reading; `forget` releases the pages that were read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header = read_header(path)
            with path.open("rb") as file:
                # Private and writable, since torch.frombuffer warns about other maps. Nothing is ever written, so no
                # memory is reserved: a part may be larger than memory.
                self._map = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
            shapes, self.extra = json.loads(header.metadata["shapes"]), json.loads(header.metadata["extra"])
            self.stored = tuple(_stored(name, entry, shapes) for name, entry in header.tensors.items())
        except (OSError, ValueError, KeyError, TypeError) as broken:
            raise CheckpointError(
                f"{path} is not a part of a checkpoint: {broken}", hint="take another checkpoint"
            ) from broken

    @property
    def node(self) -> int:
        """The node that wrote this part, given as the lowest of the ranks that share its folder."""
        return int(self.extra.get("home", 0))

    def tensor(self, item: StoredChunk) -> torch.Tensor:
        """The chunk of `item` in the mapped file; copy what is needed, then call `forget`."""
        return torch.frombuffer(self._map, dtype=item.dtype, count=item.chunk.numel, offset=item.begin).view(
            item.chunk.sizes
        )

    def forget(self) -> None:
        """Release the pages read so far from this process's memory."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _stored(name: str, entry: HeaderEntry, shapes: Mapping[str, Sequence[int]]) -> StoredChunk:
    key, _, offsets = name.rpartition("@")
    chunk = Chunk(tuple(int(offset) for offset in offsets.split(",") if offset), entry.shape)
    return StoredChunk(key, tuple(shapes[key]), chunk, entry.dtype, entry.begin)
