"""Converts a model's tensors to the weight files of a Hugging Face folder, in bounded chunks on several threads."""

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from ds_finetune.console.phase_line import PhaseLine
from ds_finetune.export.safetensors_folder import FolderParts, folder_writer
from ds_finetune.export.shards import HubTensor, ShardWriter
from ds_finetune.export.source import TensorSource, check_finite
from ds_finetune.model.quantised.fp8 import BLOCK, BYTE_SCALE, FP8, quantise, quantise_like, scale_shape
from ds_finetune.model.quantised.mxfp4 import PACKED, pack, packed_shapes
from ds_finetune.model.weights.names import hub_pieces, is_table
from ds_finetune.model.weights.safetensors_file import Scratch

CHUNK_NUMEL = 2**20
"""Number of elements that a thread reads, casts and writes at a time: 4 MiB of fp32, which fits into CPU caches."""

_COLUMNS = 16 * BLOCK
"""Number of columns of a weight that are quantised to FP8 at a time, to bound the fp32 copy."""

_WORKERS_PER_CORE, _MAX_WORKERS = 2, 16
"""Threads of a conversion: two per core, since some wait for the disk, and at most 16, which saturate a disk."""


def num_workers() -> int:
    """Number of threads that convert tensors on this machine."""
    return min(_WORKERS_PER_CORE * len(os.sched_getaffinity(0)), _MAX_WORKERS)


Blocks = tuple[int, int]
"""Numbers of FP8 blocks in an export: all blocks, and blocks copied byte for byte from the base model."""


@dataclass(frozen=True)
class Conversion:
    """Converts the tensors of `source` to the dtypes of an exported folder, described by `parts`, with `workers`
    threads.

    The `fp32_names` of the source stay in fp32. With `parts.is_fp8`, linear weights become FP8 blocks; a block that
    equals the block in the base folder `parts.fp8_base` is copied byte for byte. Other tensors get `parts.dtype`.
    """

    source: TensorSource
    parts: FolderParts
    workers: int
    _scratch: Scratch = field(default_factory=Scratch)

    @cached_property
    def tensors(self) -> tuple[HubTensor, ...]:
        """Names, shapes and dtypes of the tensors to write, in order."""
        tensors = list[HubTensor]()
        for name, shape in self.source.shapes.items():
            for piece in hub_pieces(name, shape, self.parts.family):
                scale_key = self.parts.scale_key(piece.key)
                if self.parts.in_fp8(piece.key, piece.shape):
                    scales, kind = scale_shape(piece.shape), self.parts.scale_dtype(piece.key)
                    tensors += [HubTensor(piece.key, piece.shape, FP8), HubTensor(scale_key, scales, kind)]
                elif self.parts.in_fp4(piece.key):
                    packed, scales = packed_shapes(piece.shape)
                    tensors += [HubTensor(piece.key, packed, PACKED), HubTensor(scale_key, scales, BYTE_SCALE)]
                else:
                    tensors.append(HubTensor(piece.key, piece.shape, self.dtype_of(name)))
        return tuple(tensors)

    def write(self, out: Path, *, max_shard_bytes: int) -> Blocks:
        """Write all tensors and the other files of the export to the folder `out`, which appears only when complete.

        Returns the numbers of quantised blocks. However large the model is, each thread holds one chunk of
        `CHUNK_NUMEL` elements, or 128 rows of a quantised weight. Raises the errors of `copy_to`.
        """
        with folder_writer(self.tensors, out, self.parts, max_shard_bytes=max_shard_bytes) as writer:
            return self.copy_to(writer)

    def copy_to(self, writer: ShardWriter) -> Blocks:
        """Write all tensors with `writer`; returns the numbers of quantised blocks. ExportError for NaN or infinity."""
        num_threads = torch.get_num_threads()
        # Each core already runs a thread of the conversion, so torch operations use one thread each.
        torch.set_num_threads(1)
        try:
            return _run_in_threads(lambda item: self._convert(item, writer), self._work_items(), self.workers)
        finally:
            torch.set_num_threads(num_threads)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which the unquantised tensor `name` is written."""
        if is_table(name):
            return torch.int64
        is_fp32 = name in self.source.fp32_names or self.parts.family.is_in_fp32(name)
        return torch.float32 if is_fp32 else self.parts.dtype

    def _work_items(self) -> Iterator["_WorkItem"]:
        for name, shape in self.source.shapes.items():
            for piece in hub_pieces(name, shape, self.parts.family):
                begin, numel = piece.first_element(shape), math.prod(piece.shape)
                is_blocks = self.parts.in_fp8(piece.key, piece.shape) or self.parts.in_fp4(piece.key)
                size = BLOCK * piece.shape[1] if is_blocks else CHUNK_NUMEL
                columns = piece.shape[1] if is_blocks else 0
                for start in range(0, numel, size):
                    yield _WorkItem(name, begin, piece.key, start, min(size, numel - start), columns)

    def _convert(self, item: "_WorkItem", writer: ShardWriter) -> Blocks:
        flat = self.source.read(item.name, item.begin + item.start, item.numel)
        assert flat.shape == (item.numel,), (item, flat.shape)
        if item.columns:
            check_finite(item.key, flat, flat, others="bf16")
            write = self._pack if self.parts.in_fp4(item.key) else self._quantise
            return write(item, flat.view(-1, item.columns), writer)
        dtype = self.dtype_of(item.name)
        cast = flat.contiguous() if flat.dtype == dtype else self._scratch.take(flat.numel(), dtype).copy_(flat)
        check_finite(item.key, flat, cast, others="fp32" if dtype == torch.bfloat16 else "bf16 or fp32")
        writer.write(item.key, item.start, cast)
        return 0, 0

    def _pack(self, item: "_WorkItem", values: torch.Tensor, writer: ShardWriter) -> Blocks:
        row = item.start // item.columns
        base = self.parts.fp8_base.fp4(item.key) if self.parts.fp8_base is not None else None
        packed, scales, copied = pack(values, base.stored_rows(row, row + len(values)) if base is not None else None)
        writer.write(item.key, row * packed.shape[1], packed.view(-1))
        writer.write(self.parts.scale_key(item.key), row * scales.shape[1], scales.view(-1))
        return scales.numel(), copied

    def _quantise(self, item: "_WorkItem", values: torch.Tensor, writer: ShardWriter) -> Blocks:
        """Write some rows of a weight as FP8 blocks with scales; only `_COLUMNS` columns at a time are in fp32."""
        parts, row = self.parts, item.start // item.columns
        base = parts.fp8_base if parts.fp8_base is not None and parts.fp8_base.is_fp8(item.key) else None
        rows = item.key, row, row + len(values)
        stored = None if base is None else (base.stored_rows(*rows), base.scales(*rows)[0])
        quantised, scale = torch.empty(values.shape, dtype=FP8), torch.empty(scale_shape(values.shape)[1])
        num_copied = 0
        for first in range(0, item.columns, _COLUMNS):
            columns, blocks = slice(first, first + _COLUMNS), slice(first // BLOCK, (first + _COLUMNS) // BLOCK)
            part = values[:, columns].float()
            if stored is None:
                quantised[:, columns], scale[blocks] = quantise(part, scales_of_two=parts.has_scales_of_two)
            else:
                quantised[:, columns], scale[blocks], same = quantise_like(
                    part, stored[0][:, columns], stored[1][blocks], scales_of_two=parts.has_scales_of_two
                )
                num_copied += int(same.sum())
        writer.write(item.key, item.start, quantised.view(-1))
        writer.write(parts.scale_key(item.key), row // BLOCK * len(scale), scale.to(parts.scale_dtype(item.key)))
        return len(scale), num_copied


@dataclass(frozen=True, slots=True)
class _WorkItem:
    """A chunk to convert: elements `start` to `start + numel` of the published tensor `key`.

    In the source, `key` is part of the tensor `name`, from element `begin` on. `columns` is the number of columns of a
    weight to be quantised, and 0 for other tensors.
    """

    name: str
    begin: int
    key: str
    start: int
    numel: int
    columns: int


def _run_in_threads(work: Callable[[_WorkItem], Blocks], items: Iterable[_WorkItem], workers: int) -> Blocks:
    """Call `work` for every item on several threads, roughly in order, with a progress line. Returns the sums of the
    results. An error in one thread ends all threads and is raised.
    """
    remaining, lock, written, copied = deque(items), threading.Lock(), 0, 0
    line = PhaseLine("converting tensors", len(remaining))

    def next_item() -> _WorkItem | None:
        with lock:
            return remaining.popleft() if remaining else None

    def drain() -> None:
        nonlocal written, copied
        try:
            for item in iter(next_item, None):
                blocks = work(item)
                with lock:
                    line.advance()
                    written, copied = written + blocks[0], copied + blocks[1]
        finally:
            remaining.clear()

    with line, ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(drain) for _ in range(workers)]
        try:
            for future in futures:
                future.result()
        finally:
            remaining.clear()
    return written, copied
