"""Storage classes for torch.distributed.checkpoint: each rank's part is one file (part_file.py).

`serialise_part` turns a rank's state into the bytes of its part and gives them to a `PartSink` (part_sinks.py), which
writes them. `read_state_groups` reads state from parts.
"""

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
from ds_finetune.checkpoint.planners import RestorePlanner, StatePlanner, share_of_slice
from ds_finetune.engine.state import WEIGHT, StateGroup
from ds_finetune.quiet import quiet_packages

# Each rank saves and loads without the others. torch warns of this; its warning is silenced.
quiet_packages()


class PartSink(Protocol):
    """Receives the bytes of a part, in order."""

    def begin(self, num_bytes: int) -> None:
        """Prepare for a part of `num_bytes`."""
        ...

    def write(self, values: torch.Tensor) -> None:
        """Append the bytes of a contiguous 1-D tensor on any device."""
        ...


class PartStorageWriter(StorageWriter):
    """Gives one rank's part to `sink`: a header that holds `extra`, then the rank's chunks."""

    def __init__(self, sink: PartSink, extra: Mapping[str, Any]) -> None:
        self._sink, self._extra = sink, extra

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: no state is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Do nothing: the sink was given at the start."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, unchanged."""
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
        """Do nothing: the header of each part takes the place of torch's metadata file."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: this object is passed to torch, never selected by a path."""
        return False


class PartStorageReader(StorageReader):
    """Reads chunks from parts. The wanted chunks may be cut differently from the stored ones."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.parts = [PartFile(path) for path in paths]
        # Replicated tensors are stored once per node, split over its ranks. Those of one node are read.
        nodes: dict[str, int] = {}
        for part in self.parts:
            for key in part.extra["replicated"]:
                nodes[key] = min(nodes.get(key, part.node), part.node)
        self.held: dict[str, list[tuple[PartFile, StoredChunk]]] = {}
        seen: set[tuple[str, Chunk]] = set()
        for part in self.parts:
            for item in part.stored:
                # Nodes without a shared folder may each have a chunk that ranks of several nodes hold.
                if nodes.get(item.key, part.node) == part.node and (item.key, item.chunk) not in seen:
                    seen.add((item.key, item.chunk))
                    self.held.setdefault(item.key, []).append((part, item))
        every = [pair for held in self.held.values() for pair in held if pair[1].chunk.numel]
        self._metadata = _metadata(item for held in self.held.values() for _, item in held)
        self._where = {MetadataIndex(item.key, torch.Size(item.chunk.offsets)): (part, item) for part, item in every}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the parts were given at the start."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401
        """Every tensor of the parts with its chunks."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the wanted range of each stored chunk to the planner's target."""
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
        """False: this object is passed to torch, never selected by a path."""
        return False


def serialise_part(
    groups: Sequence[StateGroup], sink: PartSink, extra: Mapping[str, Any], *, share: tuple[int, int]
) -> None:
    """Give this rank's part of `groups` to `sink`, through torch.distributed.checkpoint.

    Of a replicated tensor the part holds share `index` of `count`, where `share` is (index, count).
    """
    slices = [
        [share_of_slice(piece, *share) if piece.is_replicated else piece for piece in group.slices] for group in groups
    ]
    planner = StatePlanner(groups, slices)
    extra = {
        **extra,
        "replicated": sorted({piece.key for group in groups for piece in group.slices if piece.is_replicated}),
    }
    try:
        with _plain_errors():
            save({}, storage_writer=PartStorageWriter(sink, extra), planner=planner, no_dist=True)
    finally:
        planner.close()


def read_state_groups(groups: Sequence[StateGroup], reader: PartStorageReader, *, absent: str) -> None:
    """Fill the slices of `groups` from the parts of `reader`; `absent` names missing parts, for the error message."""
    for group in groups:
        with group.opened(True) as read, _plain_errors():
            load({}, storage_reader=reader, planner=RestorePlanner(group.slices, read, absent=absent), no_dist=True)


def num_weights(groups: Sequence[StateGroup], *, share: tuple[int, int]) -> int:
    """Number of weights in this rank's part; `share` as for `serialise_part`."""
    pieces = (piece for group in groups for piece in group.slices)
    written = (share_of_slice(piece, *share) if piece.is_replicated else piece for piece in pieces)
    return sum(piece.numel for piece in written if piece.key.startswith(f"{WEIGHT}/"))


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the original error where torch.distributed.checkpoint wraps it in a BaseException of its own."""
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
