"""Slices of tensors that ranks hold, as chunks, and the shares of them that ranks write."""

from dataclasses import replace

from ds_finetune.checkpoint.chunks import Chunk, flat_range_chunks
from ds_finetune.engine.state import Slice


def chunks_of_slice(piece: Slice) -> list[tuple[Chunk, int]]:
    """The chunks of the global tensor that a slice covers, each with its offset among the slice's elements."""
    chunks, position = [], 0
    for chunk in flat_range_chunks(piece.local_shape or piece.shape, piece.start, piece.numel):
        chunks.append((chunk.moved(piece.origin) if piece.origin else chunk, position))
        position += chunk.numel
    return chunks


def share_of_slice(piece: Slice, index: int, count: int) -> Slice:
    """Share `index` of a replicated slice that `count` ranks divide among them for writing."""
    first, last = piece.numel * index // count, piece.numel * (index + 1) // count
    return replace(piece, start=piece.start + first, numel=last - first)
