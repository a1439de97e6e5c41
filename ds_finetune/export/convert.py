"""A checkpoint to a Hugging Face folder in bounded pieces: checked against the model's class, cast, written where each
piece belongs.
"""

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

from ds_finetune.errors import ExportError
from ds_finetune.export.folder import FolderParts, folder_writer
from ds_finetune.export.shards import HubTensor, ShardWriter
from ds_finetune.export.source import TensorSource
from ds_finetune.model.fp8 import BLOCK, FP8, SCALE, quantise, quantise_like, scale_shape
from ds_finetune.model.names import hub_pieces

CHUNK_NUMEL = 2**20
"""Elements read, cast and written at a time by each thread: 4 MiB of fp32, which caches still hold when they are cast.
"""

_COLUMNS = 16 * BLOCK
"""Columns that are quantised at a time."""

_WORKERS_PER_CORE, _MOST_WORKERS = 2, 16
"""Threads that each hold a chunk: while some wait for the disk, others cast; beyond the limit one disk gains nothing.
"""


def workers() -> int:
    """Threads of a conversion on this machine."""
    return min(_WORKERS_PER_CORE * len(os.sched_getaffinity(0)), _MOST_WORKERS)


class BlockCounts:
    """How many FP8 blocks were written, and how many of them with the bytes of a base; counted from any thread."""

    def __init__(self) -> None:
        self.written = self.kept = 0
        self._lock = threading.Lock()

    def count(self, written: int, kept: int) -> None:
        """Add to both."""
        with self._lock:
            self.written, self.kept = self.written + written, self.kept + kept


@dataclass(frozen=True)
class Conversion:
    """All tensors of `source` in the dtypes of `parts`, by so many threads: `parts.dtype`, fp32 for `fp32_names`, FP8
    blocks for linear weights.

    A block whose numbers are those of `parts.fp8_base` keeps its bytes there.
    """

    source: TensorSource
    parts: FolderParts
    workers: int
    blocks: BlockCounts = field(default_factory=BlockCounts)

    @cached_property
    def tensors(self) -> tuple[HubTensor, ...]:
        """What will be written, in order."""
        return tuple(tensor for name, shape in self.source.shapes.items() for tensor in self._hub_tensors(name, shape))

    def copy_to(self, writer: ShardWriter) -> None:
        """Write all of them, each thread with one chunk or one row of blocks at a time.

        A NaN or infinity, also one that the cast makes, is an ExportError naming the tensor.
        """
        with _one_thread_each():
            _in_threads(_Copier(self, writer).copy, self._chunks(), self.workers)

    def dtype_of(self, name: str) -> torch.dtype:
        """What a tensor that is not in FP8 is written as."""
        return torch.float32 if name in self.source.fp32_names else self.parts.dtype

    def _hub_tensors(self, name: str, shape: tuple[int, ...]) -> Iterator[HubTensor]:
        for piece in hub_pieces(name, shape, self.parts.family):
            if self.parts.in_fp8(piece.key, piece.shape):
                yield HubTensor(piece.key, piece.shape, FP8)
                yield HubTensor(piece.key + SCALE, scale_shape(piece.shape), torch.float32)
            else:
                yield HubTensor(piece.key, piece.shape, self.dtype_of(name))

    def _chunks(self) -> Iterator["_Chunk"]:
        for name, shape in self.source.shapes.items():
            for piece in hub_pieces(name, shape, self.parts.family):
                begin, numel = piece.first_element(shape), math.prod(piece.shape)
                is_blocks = self.parts.in_fp8(piece.key, piece.shape)
                size = BLOCK * piece.shape[1] if is_blocks else CHUNK_NUMEL
                columns = piece.shape[1] if is_blocks else 0
                for start in range(0, numel, size):
                    yield _Chunk(name, begin, piece.key, start, min(size, numel - start), columns)


def convert_source(
    source: TensorSource, out: Path, parts: FolderParts, *, max_shard_bytes: int, workers: int
) -> BlockCounts:
    """Write every tensor of `source` as `parts` says, and `parts`, to `out`, which appears only when complete.

    `workers` threads each hold one chunk of `CHUNK_NUMEL` elements or 128 rows, read and cast, whatever the size of
    tensors
    and files. A NaN or infinity, also one that the cast makes, is an ExportError naming the tensor.
    """
    conversion = Conversion(source, parts, workers)
    with folder_writer(conversion.tensors, out, parts, max_shard_bytes=max_shard_bytes) as writer:
        conversion.copy_to(writer)
    return conversion.blocks


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Elements `start` to `start + numel` of the hub tensor `key`, whose first element is the model tensor `name`'s
    element `begin`.

    A row of blocks, to be quantised, where it has `columns`.
    """

    name: str
    begin: int
    key: str
    start: int
    numel: int
    columns: int


class _Copier(threading.local):
    """Reads, casts and writes a chunk; each thread that uses it has a buffer of its own for the cast."""

    def __init__(self, conversion: Conversion, writer: ShardWriter) -> None:
        self._conversion, self._writer = conversion, writer
        self._buffer = torch.empty(0)

    def copy(self, chunk: _Chunk) -> None:
        """Do one chunk."""
        flat = self._conversion.source.read(chunk.name, chunk.begin + chunk.start, chunk.numel)
        assert flat.shape == (chunk.numel,), (chunk, flat.shape)
        if chunk.columns:
            _check_finite(chunk, flat, flat)
            self._quantise(chunk, flat.view(-1, chunk.columns))
            return
        cast = self._cast(flat, self._conversion.dtype_of(chunk.name))
        _check_finite(chunk, flat, cast)
        self._writer.write(chunk.key, chunk.start, cast)

    def _quantise(self, chunk: _Chunk, values: torch.Tensor) -> None:
        """Write a row of blocks [rows, columns] and its scales, some columns at a time, so that little is held as
        fp32.
        """
        row = chunk.start // chunk.columns
        known = self._known(chunk.key, row, row + len(values))
        made, scale = torch.empty(values.shape, dtype=FP8), torch.empty(scale_shape(values.shape)[1])
        kept = 0
        for first in range(0, chunk.columns, _COLUMNS):
            columns, blocks = slice(first, first + _COLUMNS), slice(first // BLOCK, (first + _COLUMNS) // BLOCK)
            part = values[:, columns].float()
            if known is None:
                made[:, columns], scale[blocks] = quantise(part)
            else:
                made[:, columns], scale[blocks], same = quantise_like(part, known[0][:, columns], known[1][blocks])
                kept += int(same.sum())
        self._writer.write(chunk.key, chunk.start, made.view(-1))
        self._writer.write(chunk.key + SCALE, row // BLOCK * len(scale), scale)
        self._conversion.blocks.count(len(scale), kept)

    def _known(self, key: str, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Bytes and scales of a row of blocks in the base, where it has them."""
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


def _check_finite(chunk: _Chunk, flat: torch.Tensor, cast: torch.Tensor) -> None:
    low, high = torch.aminmax(cast)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        is_read = bool(torch.isfinite(flat).all())
        raise ExportError(
            f"tensor `{chunk.key}` holds NaN or infinity {f'as {cast.dtype}' if is_read else 'in the checkpoint'}",
            hint="export with --dtype bf16 or fp32"
            if is_read
            else "the run diverged before this checkpoint; export an older one",
        )


def _in_threads(work: Callable[[_Chunk], None], chunks: Iterable[_Chunk], workers: int) -> None:
    """Do `work` for every chunk, about in order; after a failure nothing new is begun, and the first error is
    raised.
    """
    left = deque(chunks)

    def drain() -> None:
        try:
            for chunk in iter(lambda: _next(left), None):
                work(chunk)
        finally:
            left.clear()

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(drain) for _ in range(workers)]
        try:
            for future in futures:
                future.result()
        finally:
            left.clear()


def _next(chunks: deque[_Chunk]) -> _Chunk | None:
    try:
        return chunks.popleft()
    except IndexError:
        return None


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Torch casts within the calling thread, since all cores are busy with chunks of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
