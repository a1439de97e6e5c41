"""Storage of torch.distributed.checkpoint in parts: one file for each rank, with a JSON header."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import CheckpointException, load, save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ds_finetune.checkpoint.chunks import Chunk
from ds_finetune.checkpoint.part_file import PartFile, StoredChunk, part_header
from ds_finetune.checkpoint.planners import RestorePlanner, StatePlanner, writer_share
from ds_finetune.engine.state import WEIGHT, StateGroup
from ds_finetune.quiet import quiet_packages

# Each rank saves and loads by itself, on purpose, of which torch warns.
quiet_packages()


class PartSink(Protocol):
    """Where the bytes of a part go, in order."""

    def begin(self, num_bytes: int) -> None:
        """Make room for a part of `num_bytes`."""
        ...

    def write(self, values: torch.Tensor) -> None:
        """Take the bytes of a contiguous 1-D tensor, on any device."""
        ...


class PartWriter(StorageWriter):
    """Writes the header, which holds `extra`, and one rank's chunks to `sink`."""

    def __init__(self, sink: PartSink, extra: Mapping[str, Any]) -> None:
        self._sink, self._extra = sink, extra

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing to set up: the sink is given."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write header and chunks."""
        stored = [_stored(item) for item in plan.items]
        head = part_header(stored, self._extra)
        self._sink.begin(len(head) + sum(item.num_bytes for item in stored))
        self._sink.write(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for item in plan.items:
            values = planner.resolve_data(item)
            assert isinstance(values, torch.Tensor)
            self._sink.write(values)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(item.index, stored.num_bytes, None) for item, stored in zip(plan.items, stored, strict=True)]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The header describes the part; there is no file of metadata."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by a path."""
        return False


class PartsReader(StorageReader):
    """Reads chunks from parts; those that are wanted may be cut differently from those that are stored."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.parts = [PartFile(path) for path in paths]
        # Each node keeps all of what every rank holds, divided among its own ranks; one node's is used.
        homes: dict[str, int] = {}
        for part in self.parts:
            for key in part.extra["replicated"]:
                homes[key] = min(homes.get(key, part.home), part.home)
        self.held: dict[str, list[tuple[PartFile, StoredChunk]]] = {}
        for part in self.parts:
            for item in part.stored:
                if homes.get(item.key, part.home) == part.home:
                    self.held.setdefault(item.key, []).append((part, item))
        every = [pair for held in self.held.values() for pair in held if pair[1].chunk.numel]
        self._metadata = _metadata(item for held in self.held.values() for _, item in held)
        self._where = {MetadataIndex(item.key, torch.Size(item.chunk.offsets)): (part, item) for part, item in every}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The parts were given at the start."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401
        """Every tensor of the parts with its chunks."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the wanted part of each chunk to the planner's target."""
        for item in plan.items:
            part, stored = self._where[item.storage_index]
            source = part.tensor(stored)
            for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, first, length)
            target = planner.resolve_tensor(item)
            target.copy_(source)
            planner.commit_tensor(item, target)
            del source
            part.forget()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by a path."""
        return False


def write_part(
    groups: Sequence[StateGroup], sink: PartSink, extra: Mapping[str, Any], *, writer: tuple[int, int]
) -> None:
    """Save this rank's part of `groups` through torch.distributed.checkpoint; `writer` (index, count) is its place
    among those that hold the same.
    """
    slices = [
        [writer_share(part, *writer) if part.is_replicated else part for part in group.slices] for group in groups
    ]
    planner = StatePlanner(groups, slices)
    extra = {
        **extra,
        "replicated": sorted({part.key for group in groups for part in group.slices if part.is_replicated}),
    }
    try:
        with _plain_errors():
            save({}, storage_writer=PartWriter(sink, extra), planner=planner, no_dist=True)
    finally:
        planner.close()


def read_state_groups(groups: Sequence[StateGroup], reader: PartsReader, *, absent: str) -> None:
    """Fill the slices of `groups` from the parts of `reader`; `absent` names parts that are not here, for the error."""
    for group in groups:
        with group.opened(True) as read, _plain_errors():
            load({}, storage_reader=reader, planner=RestorePlanner(group.slices, read, absent=absent), no_dist=True)


def num_weights(groups: Sequence[StateGroup], *, writer: tuple[int, int]) -> int:
    """Parameters whose weights are in this rank's part."""
    slices = (writer_share(part, *writer) if part.is_replicated else part for group in groups for part in group.slices)
    return sum(part.numel for part in slices if part.key.startswith(f"{WEIGHT}/"))


@contextmanager
def _plain_errors() -> Iterator[None]:
    """torch.distributed.checkpoint wraps every error in a BaseException of its own; what went wrong is raised
    instead.
    """
    try:
        yield
    except CheckpointException as wrapped:
        error, _ = next(iter(wrapped.failures.values()))
        raise error from None


def _stored(item: WriteItem) -> StoredChunk:
    data = item.tensor_data
    assert data is not None
    chunk = Chunk(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return StoredChunk(item.index.fqn, tuple(data.size), chunk, data.properties.dtype, 0)


def _metadata(stored: Iterable[StoredChunk]) -> Metadata:
    tensors: dict[str, TensorStorageMetadata] = {}
    for item in stored:
        properties = TensorProperties(dtype=item.dtype)
        held = tensors.setdefault(item.key, TensorStorageMetadata(properties, torch.Size(item.shape), []))
        held.chunks.append(ChunkStorageMetadata(torch.Size(item.chunk.offsets), torch.Size(item.chunk.sizes)))
    return Metadata(dict(tensors))
