"""A part: what one rank wrote, a safetensors file whose tensors are boxes of global tensors. Plain JSON and bytes,
nothing to unpickle.
"""

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_finetune.checkpoint.boxes import Box
from ds_finetune.errors import CheckpointError

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_MAP_NORESERVE = 0x4000
"""Linux's; Python names it from 3.13 on."""


@dataclass(frozen=True)
class Stored:
    """A box of the global tensor `key` of `shape`, stored at byte `begin` of its file."""

    key: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    begin: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return self.box.numel * self.dtype.itemsize


def part_name(rank: int, world_size: int) -> str:
    """File name of the part of `rank`."""
    return f"part-{rank:05d}-of-{world_size:05d}.safetensors"


def header_of(stored: Sequence[Stored], extra: Mapping[str, Any]) -> bytes:
    """The head of a part whose boxes follow in order; `begin` is not looked at. `extra` is kept as JSON."""
    shapes = {item.key: item.shape for item in stored}
    tree: dict[str, Any] = {
        "__metadata__": {"format": "pt", "shapes": json.dumps(shapes), "extra": json.dumps(dict(extra))}
    }
    position = 0
    for item in stored:
        name = f"{item.key}@{','.join(map(str, item.box.offsets))}"
        assert name not in tree, name
        tree[name] = {
            "dtype": _CODES[item.dtype],
            "shape": item.box.sizes,
            "data_offsets": [position, position + item.num_bytes],
        }
        position += item.num_bytes
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


class PartFile:
    """A part opened for reading; its pages are given back as soon as they are copied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                tree = json.loads(file.read(length))
                # Private and writable, since torch.frombuffer warns about other ones; nothing is ever written, so no
                # memory is set apart
                # for it: a part may be larger than memory.
                self._map = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
            metadata = tree.pop("__metadata__")
            shapes, self.extra = json.loads(metadata["shapes"]), json.loads(metadata["extra"])
            self.stored = tuple(self._item(name, item, shapes, _LENGTH.size + length) for name, item in tree.items())
        except (OSError, ValueError, KeyError, struct.error) as broken:
            raise CheckpointError(
                f"{path} is not a part of a checkpoint: {broken}", hint="take another checkpoint"
            ) from broken

    @property
    def home(self) -> int:
        """The first of the ranks that share a folder with the one that wrote this."""
        return int(self.extra.get("home", 0))

    def _item(self, name: str, item: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], base: int) -> Stored:
        key, _, offsets = name.rpartition("@")
        box = Box(tuple(int(o) for o in offsets.split(",") if o), tuple(item["shape"]))
        stored = Stored(key, tuple(shapes[key]), box, DTYPES[item["dtype"]], base + item["data_offsets"][0])
        if stored.begin + stored.num_bytes > len(self._map):
            raise ValueError(f"`{name}` ends at byte {stored.begin + stored.num_bytes} of {len(self._map)}")
        return stored

    def tensor(self, item: Stored) -> torch.Tensor:
        """The box of `item` as it lies in the file; copy what is needed, then call `forget`."""
        return torch.frombuffer(self._map, dtype=item.dtype, count=item.box.numel, offset=item.begin).view(
            item.box.sizes
        )

    def forget(self) -> None:
        """Take the pages read so far out of this process's memory."""
        self._map.madvise(mmap.MADV_DONTNEED)
