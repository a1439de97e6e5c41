"""Writes the state of a rank as its part of a checkpoint, and reads state from the parts of any ranks.

A part is the safetensors file of one rank. A rank has flat ranges of tensors, which are stored as chunks: n-dimensional
boxes of the global tensors. `serialise_part` turns a rank's state into the bytes of its part, which part_writers.py
writes. `read_state_groups` reads state from parts that may be divided differently.
"""

import json
import math
import mmap
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_finetune.engine.state.state import WEIGHT, Read, Slice, StateGroup
from ds_finetune.errors import CheckpointError
from ds_finetune.model.weights.safetensors_file import HeaderEntry, encode_header, read_header

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a global tensor, from index `offsets` on, with `sizes` elements along each dimension."""

    offsets: Ints
    sizes: Ints

    @property
    def numel(self) -> int:
        """Number of elements of the chunk."""
        return math.prod(self.sizes)


def flat_range_chunks(shape: Ints, start: int, numel: int) -> Iterator[Chunk]:
    """Divide the elements [start, start + numel) of a row-major tensor of `shape` into boxes, in order. Each box is a
    contiguous piece of the range, and there are at most 2 x dimensions - 1 boxes.
    """
    if numel == 0:
        return
    if not shape:
        yield Chunk((), ())
        return
    inner = math.prod(shape[1:])
    row, column = divmod(start, inner)
    if column or numel < inner:
        within = min(numel, inner - column)
        yield from (
            Chunk((row, *inner_chunk.offsets), (1, *inner_chunk.sizes))
            for inner_chunk in flat_range_chunks(shape[1:], column, within)
        )
        yield from flat_range_chunks(shape, start + within, numel - within)
        return
    rows = numel // inner
    yield Chunk((row,) + (0,) * (len(shape) - 1), (rows, *shape[1:]))
    yield from flat_range_chunks(shape, start + rows * inner, numel - rows * inner)


def flat_bounds(chunk: Chunk, shape: Ints) -> tuple[int, int]:
    """Indices of the first and the last element of a chunk in the flattened tensor of `shape`."""
    first = last = 0
    for size, offset, length in zip(shape, chunk.offsets, chunk.sizes, strict=True):
        first, last = first * size + offset, last * size + offset + length - 1
    return first, last


def overlap(one: Chunk, other: Chunk) -> Chunk | None:
    """The intersection of two chunks; None if it is empty."""
    first = tuple(map(max, one.offsets, other.offsets))
    last = tuple(
        min(a + n, b + m) for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    if any(end <= begin for begin, end in zip(first, last, strict=True)):
        return None
    return Chunk(first, tuple(end - begin for begin, end in zip(first, last, strict=True)))


_MAP_NORESERVE = 0x4000
"""Linux's mmap flag for a map without reserved memory. Python defines the flag from version 3.13 on."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of the global tensor `key` of `shape`, stored in a part file from byte `begin` on."""

    key: str
    shape: tuple[int, ...]
    chunk: Chunk
    dtype: torch.dtype
    begin: int


class PartFile:
    """File of one rank's part of a checkpoint, mapped to memory. `forget` releases the pages that were read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header = read_header(path)
            with path.open("rb") as file:
                # The map is private and writable, because torch.frombuffer warns about other maps. Nothing is written
                # to it, so no memory is reserved: the file may be larger than the memory.
                self._map = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
            shapes, self.extra = json.loads(header.metadata["shapes"]), json.loads(header.metadata["extra"])
            self.stored = tuple(_stored(name, entry, shapes) for name, entry in header.tensors.items())
        except (OSError, ValueError, KeyError, TypeError) as broken:
            raise CheckpointError(
                f"{path} is not a part of a checkpoint: {broken}", hint="use another checkpoint"
            ) from broken

    @property
    def node(self) -> int:
        """Lowest rank of the node that wrote this part. A node is all ranks that use one checkpoint folder."""
        return int(self.extra.get("home", 0))

    def tensor(self, item: StoredChunk) -> torch.Tensor:
        """Chunk `item` as a tensor in the mapped file. The caller copies what it needs, then calls `forget`."""
        return torch.frombuffer(self._map, dtype=item.dtype, count=item.chunk.numel, offset=item.begin).view(
            item.chunk.sizes
        )

    def forget(self) -> None:
        """Release from memory the pages of the file that this process has read."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _stored(name: str, entry: HeaderEntry, shapes: Mapping[str, Sequence[int]]) -> StoredChunk:
    key, _, offsets = name.rpartition("@")
    chunk = Chunk(tuple(int(offset) for offset in offsets.split(",") if offset), entry.shape)
    return StoredChunk(key, tuple(shapes[key]), chunk, entry.dtype, entry.begin)


class PartReader:
    """Reads any chunk of a tensor from a checkpoint's part files, however these divide the tensor."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.parts = [PartFile(path) for path in paths]
        # A replicated tensor is stored once per node, divided among the node's ranks. It is read from one node.
        nodes: dict[str, int] = {}
        for part in self.parts:
            for key in part.extra["replicated"]:
                nodes[key] = min(nodes.get(key, part.node), part.node)
        self.held: dict[str, list[tuple[PartFile, StoredChunk]]] = {}
        seen: set[tuple[str, Chunk]] = set()
        for part in self.parts:
            for item in part.stored:
                # If nodes share no folder, ranks of several nodes may store the same chunk; the first one is read.
                if nodes.get(item.key, part.node) == part.node and (item.key, item.chunk) not in seen:
                    seen.add((item.key, item.chunk))
                    self.held.setdefault(item.key, []).append((part, item))
        self._bounds: dict[str, np.ndarray] = {}

    def copy(self, key: str, chunk: Chunk, target: torch.Tensor) -> int:
        """Copy a chunk of the tensor `key` from the part files to `target`, which has the chunk's sizes. Returns the
        number of copied elements. It is smaller than the chunk if some elements are in no part file.
        """
        copied, stored = 0, self.held[key]
        # Stored chunks are preselected by their ranges of flat indices, because a thousand ranks at ZeRO-3 store
        # thousands of chunks of each tensor.
        if key not in self._bounds:
            self._bounds[key] = np.array([flat_bounds(item.chunk, item.shape) for _, item in stored], dtype=np.int64)
        first, last = flat_bounds(chunk, stored[0][1].shape)
        bounds = self._bounds[key]
        near = np.flatnonzero((bounds[:, 0] <= last) & (bounds[:, 1] >= first))
        for part, item in (stored[number] for number in near):
            shared = overlap(chunk, item.chunk)
            if shared is None:
                continue
            source, destination = part.tensor(item), target
            for dim, (at, length) in enumerate(zip(shared.offsets, shared.sizes, strict=True)):
                source = source.narrow(dim, at - item.chunk.offsets[dim], length)
                destination = destination.narrow(dim, at - chunk.offsets[dim], length)
            destination.copy_(source)
            copied += shared.numel
            del source
            part.forget()
        return copied


def serialise_part(
    groups: Sequence[StateGroup], extra: Mapping[str, Any], *, portion: tuple[int, int]
) -> tuple[int, Generator[torch.Tensor, None, None]]:
    """Serialise this rank's part of the state `groups`. Returns the part's size in bytes, and its bytes as
    contiguous 1-D tensors on any device.

    The bytes begin with a safetensors header that has `extra` as JSON metadata; then follow the chunks of tensors.
    `portion` is (index, count): a replicated tensor is divided among `count` ranks, and this rank writes portion
    `index`. A group is in memory only while its chunks are yielded.
    """
    chunks = [[*_chunks_to_write(group, portion)] for group in groups]
    stored = [item for of_group in chunks for item, _ in of_group]
    replicated = sorted({piece.key for group in groups for piece in group.slices if piece.is_replicated})
    shapes = {item.key: item.shape for item in stored}
    metadata = {"shapes": json.dumps(shapes), "extra": json.dumps({**extra, "replicated": replicated})}
    named = ((f"{item.key}@{','.join(map(str, item.chunk.offsets))}", item.dtype, item.chunk.sizes) for item in stored)
    head, _ = encode_header(named, {"format": "pt", **metadata})

    def tensors() -> Generator[torch.Tensor, None, None]:
        yield torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for group, of_group in ((group, of_group) for group, of_group in zip(groups, chunks, strict=True) if of_group):
            with group.opened(False) as read:
                for item, at in of_group:
                    yield read(item.key)[at : at + item.chunk.numel]

    return len(head) + sum(item.chunk.numel * item.dtype.itemsize for item in stored), tensors()


def _chunks_to_write(group: StateGroup, portion: tuple[int, int]) -> Iterator[tuple[StoredChunk, int]]:
    for part in group.slices:
        piece = portion_of_slice(part, *portion) if part.is_replicated else part
        for chunk, at in chunks_of_slice(piece):
            yield StoredChunk(piece.key, piece.shape, chunk, piece.dtype, 0), piece.start - part.start + at


def read_state_groups(groups: Sequence[StateGroup], reader: PartReader, *, absent: str) -> None:
    """Read the state `groups` of this rank, slice by slice, from the part files of a checkpoint. CheckpointError if a
    tensor is missing, has another shape, or is in missing part files; `absent` is the message's text about these.
    """
    for group in groups:
        with group.opened(True) as read:
            for piece in group.slices:
                _read_slice(piece, reader, read, absent=absent)


def _read_slice(piece: Slice, reader: PartReader, read: Read, *, absent: str) -> None:
    stored, copied = reader.held.get(piece.key), 0
    if stored is None or stored[0][1].shape != piece.shape:
        description = "nothing" if stored is None else f"shape {stored[0][1].shape}"
        raise CheckpointError(
            f"`{piece.key}` has shape {piece.shape} in this run, and the checkpoint has {description} for it",
            hint="resume with the model from which the checkpoint was saved",
        )
    for chunk, at in chunks_of_slice(piece):
        copied += reader.copy(piece.key, chunk, read(piece.key)[at : at + chunk.numel].view(chunk.sizes))
    if copied != piece.numel:
        raise CheckpointError(
            f"{piece.numel - copied:,} elements of `{piece.key}` are in missing parts of the checkpoint: {absent}",
            hint="gather all parts with `ds-finetune checkpoint gather`, or start the same ranks on the same nodes",
        )


def num_weights(groups: Sequence[StateGroup], *, portion: tuple[int, int]) -> int:
    """Number of weights that this rank saves. Of replicated weights it saves only its `portion`, (index, count)."""
    pieces = (piece for group in groups for piece in group.slices)
    written = (portion_of_slice(piece, *portion) if piece.is_replicated else piece for piece in pieces)
    return sum(piece.numel for piece in written if piece.key.startswith(f"{WEIGHT}/"))


def chunks_of_slice(piece: Slice) -> list[tuple[Chunk, int]]:
    """Divide a rank's slice of a global tensor into chunks, each with its offset in that slice."""
    chunks, position, origin = [], 0, piece.origin or (0,) * len(piece.shape)
    for chunk in flat_range_chunks(piece.local_shape or piece.shape, piece.start, piece.numel):
        chunks.append((Chunk(tuple(map(add, chunk.offsets, origin)), chunk.sizes), position))
        position += chunk.numel
    return chunks


def portion_of_slice(piece: Slice, index: int, count: int) -> Slice:
    """Portion `index` of a replicated slice whose writing is divided among `count` ranks."""
    first, last = piece.numel * index // count, piece.numel * (index + 1) // count
    return replace(piece, start=piece.start + first, numel=last - first)
