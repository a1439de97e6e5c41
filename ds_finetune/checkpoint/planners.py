"""Planners for torch.distributed.checkpoint: they list the chunks of an engine's state to write, or to read."""

import io
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ds_finetune.checkpoint.chunks import Chunk, flat_range_chunks
from ds_finetune.engine.state import Read, Slice, StateGroup
from ds_finetune.errors import CheckpointError


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
    return Slice(
        piece.key,
        piece.shape,
        piece.start + first,
        last - first,
        piece.dtype,
        piece.is_replicated,
        piece.origin,
        piece.local_shape,
    )


class StatePlanner(SavePlanner):
    """Plans the writing of one rank's part, group by group.

    A group is loaded into memory when its first chunk is written.
    """

    def __init__(self, groups: Sequence[StateGroup], slices: Sequence[Sequence[Slice]]) -> None:
        self._groups, self._slices = groups, slices
        self._locations: dict[MetadataIndex, tuple[int, int, int]] = {}
        self._stack = ExitStack()
        self._open: tuple[int, Read] | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: ANN401
        """Do nothing: the groups were given at the start."""

    def create_local_plan(self) -> SavePlan:
        """A write item for each chunk."""
        items = []
        for number, slices in enumerate(self._slices):
            held_from = {held.key: held.start for held in self._groups[number].slices}
            for piece in slices:
                for chunk, position in chunks_of_slice(piece):
                    index = MetadataIndex(piece.key, torch.Size(chunk.offsets))
                    # A share begins at or after the first element of its slice.
                    self._locations[index] = (number, piece.start - held_from[piece.key] + position, chunk.numel)
                    items.append(_write_item(index, piece, chunk))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans, unchanged: the parts of different ranks do not overlap."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The elements of a chunk, 1-D, on their device."""
        number, begin, numel = self._locations[write_item.index]
        if self._open is None or self._open[0] != number:
            self.close()
            self._open = (number, self._stack.enter_context(self._groups[number].opened(False)))
        return self._open[1](write_item.index.fqn)[begin : begin + numel]

    def close(self) -> None:
        """Release the group that was loaded into memory."""
        self._open = None
        self._stack.close()


class RestorePlanner(LoadPlanner):
    """Plans the reading of one open group from any parts; `absent` names missing parts, for the error message."""

    def __init__(self, slices: Sequence[Slice], read: Read, *, absent: str) -> None:
        self._slices = {piece.key: piece for piece in slices}
        self._chunks = {
            key: {torch.Size(chunk.offsets): (chunk, at) for chunk, at in chunks_of_slice(piece)}
            for key, piece in self._slices.items()
        }
        self._read, self._absent = read, absent

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:  # noqa: ANN401
        """Keep the list of stored tensors."""
        assert metadata is not None
        self._held = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """A read item for each overlap of a wanted chunk with a stored one.

        CheckpointError for a tensor that is missing or of another shape.
        """
        items: list[ReadItem] = []
        for key, piece in self._slices.items():
            held = self._held.get(key)
            if not isinstance(held, TensorStorageMetadata) or tuple(held.size) != piece.shape:
                found = "nothing" if held is None else f"shape {tuple(held.size)}"  # type: ignore[union-attr]
                raise CheckpointError(
                    f"`{key}` has shape {piece.shape} here, the checkpoint holds {found}",
                    hint="resume the model it was saved from",
                )
            chunks = [
                ChunkStorageMetadata(offsets, torch.Size(chunk.sizes))
                for offsets, (chunk, _) in self._chunks[key].items()
            ]
            reads = create_read_items_for_chunk_list(key, held, chunks)
            covered = sum(item.lengths.numel() for item in reads)
            if covered != piece.numel:
                raise CheckpointError(
                    f"{piece.numel - covered:,} elements of `{key}` are in parts that are not here: {self._absent}",
                    hint="make the checkpoint whole with `ds-finetune checkpoint gather`, or start the same ranks "
                    "on the same nodes",
                )
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plan, unchanged: each rank reads without the others."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: everything that is stored is a tensor."""
        raise AssertionError(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor that `read_item` fills, in the shape of the chunk that is read."""
        key, offset = read_item.dest_index.fqn, read_item.dest_index.offset
        assert offset is not None
        chunk, position = self._chunks[key][offset]
        target = self._read(key)[position : position + chunk.numel].view(chunk.sizes)
        for dim, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, first, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the values are already in place."""


def _write_item(index: MetadataIndex, piece: Slice, chunk: Chunk) -> WriteItem:
    metadata = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
    data = TensorWriteData(chunk=metadata, properties=TensorProperties(dtype=piece.dtype), size=torch.Size(piece.shape))
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)
