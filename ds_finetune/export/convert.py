"""Converts the tensors of a source to a Hugging Face folder, in pieces of bounded size on several threads."""

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from ds_finetune.console.phase_line import PhaseLine
from ds_finetune.errors import ExportError
from ds_finetune.export.safetensors_folder import FolderParts, folder_writer
from ds_finetune.export.shards import HubTensor, ShardWriter
from ds_finetune.export.source import TensorSource
from ds_finetune.model.quantised.fp8 import BLOCK, BYTE_SCALE, FP8, quantise, quantise_like, scale_shape
from ds_finetune.model.quantised.mxfp4 import PACKED, pack, packed_shapes
from ds_finetune.model.weights.names import hub_pieces, is_table

CHUNK_NUMEL = 2**20
"""Elements that a thread reads, casts and writes at a time: 4 MiB of fp32, small enough to stay in CPU caches."""

_COLUMNS = 16 * BLOCK
"""Columns that are quantised at a time."""

_WORKERS_PER_CORE, _MAX_WORKERS = 2, 16
"""Threads, each with one piece: while some wait for the disk, others cast. More than the maximum do not speed up a
disk.
"""


def num_workers() -> int:
    """Number of threads of a conversion on this machine."""
    return min(_WORKERS_PER_CORE * len(os.sched_getaffinity(0)), _MAX_WORKERS)


class BlockCounts:
    """Counts FP8 blocks that were written, and how many of them were copied from a base byte for byte; thread-safe."""

    def __init__(self) -> None:
        self.written = self.kept = 0
        self._lock = threading.Lock()

    def count(self, written: int, kept: int) -> None:
        """Add `written` blocks, of which `kept` were copied."""
        with self._lock:
            self.written, self.kept = self.written + written, self.kept + kept


@dataclass(frozen=True)
class Conversion:
    """All tensors of `source`, converted to the dtypes of `parts` by `workers` threads.

    The dtype is `parts.dtype`, but fp32 for the source's `fp32_names`, and FP8 blocks for linear weights if
    `parts.is_fp8`. A block that equals the one in `parts.fp8_base` is copied byte for byte.
    """

    source: TensorSource
    parts: FolderParts
    workers: int
    blocks: BlockCounts = field(default_factory=BlockCounts)

    @cached_property
    def tensors(self) -> tuple[HubTensor, ...]:
        """Names, shapes and dtypes of the tensors to be written, in order."""
        return tuple(tensor for name, shape in self.source.shapes.items() for tensor in self._hub_tensors(name, shape))

    def write(self, out: Path, *, max_shard_bytes: int) -> None:
        """Write all tensors and `parts` to `out`, which appears only when complete; errors as in `copy_to`.

        Each thread holds one chunk of `CHUNK_NUMEL` elements or 128 rows, whatever the size of tensors and files.
        """
        with folder_writer(self.tensors, out, self.parts, max_shard_bytes=max_shard_bytes) as writer:
            self.copy_to(writer)

    def copy_to(self, writer: ShardWriter) -> None:
        """Write all tensors.

        ExportError names a tensor that holds NaN or infinity, before or after the cast.
        """
        with _torch_on_one_thread():
            _run_in_threads(_Converter(self, writer).convert, self._work_items(), self.workers)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a tensor that is not written in FP8 or FP4."""
        if is_table(name):
            return torch.int64
        is_fp32 = name in self.source.fp32_names or self.parts.family.is_in_fp32(name)
        return torch.float32 if is_fp32 else self.parts.dtype

    def _hub_tensors(self, name: str, shape: tuple[int, ...]) -> Iterator[HubTensor]:
        for piece in hub_pieces(name, shape, self.parts.family):
            if self.parts.in_fp8(piece.key, piece.shape):
                yield HubTensor(piece.key, piece.shape, FP8)
                scales, kind = scale_shape(piece.shape), self.parts.scale_dtype(piece.key)
                yield HubTensor(self.parts.scale_key(piece.key), scales, kind)
            elif self.parts.in_fp4(piece.key):
                packed, scales = packed_shapes(piece.shape)
                yield HubTensor(piece.key, packed, PACKED)
                yield HubTensor(self.parts.scale_key(piece.key), scales, BYTE_SCALE)
            else:
                yield HubTensor(piece.key, piece.shape, self.dtype_of(name))

    def _work_items(self) -> Iterator["_WorkItem"]:
        for name, shape in self.source.shapes.items():
            for piece in hub_pieces(name, shape, self.parts.family):
                begin, numel = piece.first_element(shape), math.prod(piece.shape)
                is_blocks = self.parts.in_fp8(piece.key, piece.shape) or self.parts.in_fp4(piece.key)
                size = BLOCK * piece.shape[1] if is_blocks else CHUNK_NUMEL
                columns = piece.shape[1] if is_blocks else 0
                for start in range(0, numel, size):
                    yield _WorkItem(name, begin, piece.key, start, min(size, numel - start), columns)


@dataclass(frozen=True, slots=True)
class _WorkItem:
    """Elements `start` to `start + numel` of the published tensor `key`.

    Element 0 of `key` is element `begin` of the source's tensor `name`. `columns` is not 0 for rows that are to be
    quantised.
    """

    name: str
    begin: int
    key: str
    start: int
    numel: int
    columns: int


class _Converter(threading.local):
    """Reads, casts and writes work items; each thread has its own cast buffer."""

    def __init__(self, conversion: Conversion, writer: ShardWriter) -> None:
        self._conversion, self._writer = conversion, writer
        self._buffer = torch.empty(0)

    def convert(self, item: _WorkItem) -> None:
        """Read, cast and write one item."""
        flat = self._conversion.source.read(item.name, item.begin + item.start, item.numel)
        assert flat.shape == (item.numel,), (item, flat.shape)
        if item.columns:
            _check_finite(item, flat, flat)
            write = self._pack if self._conversion.parts.in_fp4(item.key) else self._quantise
            write(item, flat.view(-1, item.columns))
            return
        cast = self._cast(flat, self._conversion.dtype_of(item.name))
        _check_finite(item, flat, cast)
        self._writer.write(item.key, item.start, cast)

    def _pack(self, item: _WorkItem, values: torch.Tensor) -> None:
        """Write some rows in FP4, and their scales."""
        parts, row = self._conversion.parts, item.start // item.columns
        base = parts.fp8_base.fp4(item.key) if parts.fp8_base is not None else None
        packed, scales, kept = pack(values, base.stored_rows(row, row + len(values)) if base is not None else None)
        self._writer.write(item.key, row * packed.shape[1], packed.view(-1))
        self._writer.write(parts.scale_key(item.key), row * scales.shape[1], scales.view(-1))
        self._conversion.blocks.count(scales.numel(), kept)

    def _quantise(self, item: _WorkItem, values: torch.Tensor) -> None:
        """Write a row of FP8 blocks [rows, columns] and its scales; only some columns at a time are held in fp32."""
        row = item.start // item.columns
        base, parts = self._base_blocks(item.key, row, row + len(values)), self._conversion.parts
        quantised, scale = torch.empty(values.shape, dtype=FP8), torch.empty(scale_shape(values.shape)[1])
        kept = 0
        for first in range(0, item.columns, _COLUMNS):
            columns, blocks = slice(first, first + _COLUMNS), slice(first // BLOCK, (first + _COLUMNS) // BLOCK)
            part = values[:, columns].float()
            if base is None:
                quantised[:, columns], scale[blocks] = quantise(part, scales_of_two=parts.has_scales_of_two)
            else:
                quantised[:, columns], scale[blocks], same = quantise_like(
                    part, base[0][:, columns], base[1][blocks], scales_of_two=parts.has_scales_of_two
                )
                kept += int(same.sum())
        self._writer.write(item.key, item.start, quantised.view(-1))
        self._writer.write(parts.scale_key(item.key), row // BLOCK * len(scale), scale.to(parts.scale_dtype(item.key)))
        self._conversion.blocks.count(len(scale), kept)

    def _base_blocks(self, key: str, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """FP8 values and scales of a row of blocks of the base, if the base has `key` in FP8."""
        base = self._conversion.parts.fp8_base
        return (
            (base.stored_rows(key, first, last), base.scales(key, first, last)[0])
            if base is not None and base.is_fp8(key)
            else None
        )

    def _cast(self, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if flat.dtype == dtype:
            return flat.contiguous()
        if self._buffer.dtype != dtype or self._buffer.numel() < flat.numel():
            self._buffer = torch.empty(flat.numel(), dtype=dtype)
        return self._buffer[: flat.numel()].copy_(flat)


def _check_finite(item: _WorkItem, flat: torch.Tensor, cast: torch.Tensor) -> None:
    low, high = torch.aminmax(cast)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        is_read = bool(torch.isfinite(flat).all())
        raise ExportError(
            f"tensor `{item.key}` holds NaN or infinity {f'as {cast.dtype}' if is_read else 'in the checkpoint'}",
            hint=f"export with --dtype {'fp32' if cast.dtype == torch.bfloat16 else 'bf16 or fp32'}"
            if is_read
            else "the run diverged before this checkpoint; export an older one",
        )


def _run_in_threads(work: Callable[[_WorkItem], None], items: Iterable[_WorkItem], workers: int) -> None:
    """Call `work` for every item, roughly in order, with a progress line; an error ends all threads and is raised."""
    remaining, lock = deque(items), threading.Lock()
    line = PhaseLine("converting tensors", len(remaining))

    def drain() -> None:
        try:
            for item in iter(lambda: _next(remaining), None):
                work(item)
                with lock:
                    line.advance()
        finally:
            remaining.clear()

    with line, ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(drain) for _ in range(workers)]
        try:
            for future in futures:
                future.result()
        finally:
            remaining.clear()


def _next(items: deque[_WorkItem]) -> _WorkItem | None:
    try:
        return items.popleft()
    except IndexError:
        return None


@contextmanager
def _torch_on_one_thread() -> Iterator[None]:
    """While open, torch uses only the calling thread: all cores are busy with work items."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
