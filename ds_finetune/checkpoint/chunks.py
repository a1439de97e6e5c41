"""Chunks: n-dimensional boxes of tensors, in which checkpoints store the flat ranges that a rank holds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """The box of a tensor that begins at index `offsets` and has `sizes` elements along each dimension."""

    offsets: Ints
    sizes: Ints

    @property
    def numel(self) -> int:
        """Number of elements of the chunk."""
        return math.prod(self.sizes)

    def moved(self, by: Ints) -> "Chunk":
        """The same chunk in a larger tensor, in which this one's tensor begins at index `by`."""
        return Chunk(tuple(mine + more for mine, more in zip(self.offsets, by, strict=True)), self.sizes)


def flat_range_chunks(shape: Ints, start: int, numel: int) -> Iterator[Chunk]:
    """The chunks that make up elements [start, start + numel) of a row-major tensor of `shape`, in order.

    There are at most 2 x dimensions - 1 chunks. Each is a contiguous piece of the range.
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
    """The intersection of two chunks; None where it is empty."""
    first = tuple(map(max, one.offsets, other.offsets))
    last = tuple(
        min(a + n, b + m) for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    if any(end <= begin for begin, end in zip(first, last, strict=True)):
        return None
    return Chunk(first, tuple(end - begin for begin, end in zip(first, last, strict=True)))
