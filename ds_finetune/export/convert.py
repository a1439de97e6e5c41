"""A checkpoint to a Hugging Face folder in bounded pieces: checked against the model's class, cast, written where each piece belongs."""

import math
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.errors import ExportError
from ds_finetune.export.folder import FolderParts, folder_writer
from ds_finetune.export.shards import ShardWriter
from ds_finetune.model.families import Family, family_of
from ds_finetune.model.names import differences, hub_pieces

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
CHUNK_NUMEL = 2**20
"""Elements read, cast and written at a time by each thread: 4 MiB of fp32, which caches still hold when they are cast."""


class TensorSource(Protocol):
    """Tensors of a model that can be read in parts, wherever they lie."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by the model's name for it."""
        ...

    @property
    def fp32_names(self) -> Collection[str]:
        """Names of tensors that are written in fp32 whatever dtype is asked for, e.g. a router's bias."""
        ...

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the row-major flattened tensor: 1-D, on the CPU, of any floating dtype.

        Called from several threads at once. The caller is done with the result before the same thread reads again, so one
        buffer for each thread is enough.
        """
        ...


@dataclass(frozen=True)
class ModelSpec:
    """What a model class holds: its name, shapes of parameters (once) and persistent buffers in order, and names that share another's tensor."""

    architecture: str
    model_type: str
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]


def read_model_spec(folder: Path) -> ModelSpec:
    """The causal LM of `folder`/config.json, built on the meta device; ExportError where transformers has none. No code of the folder is run."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, OSError) as unknown:
        reason = str(unknown).splitlines()[0]
        raise ExportError(f"{folder}/config.json: {reason}", hint="name a folder with the config.json of a causal LM by --base") from unknown
    once = dict(model.named_parameters())
    owners = {id(param): name for name, param in once.items()}
    tied = {name: owners[id(param)] for name, param in model.named_parameters(remove_duplicate=False) if name not in once}
    state = model.state_dict().keys()
    shapes = {name: tuple(tensor.shape) for name, tensor in (*once.items(), *model.named_buffers()) if name in state}
    return ModelSpec(type(model).__name__, str(config.model_type), shapes, tied)


@dataclass(frozen=True)
class _Fitted:
    """A source with exactly the tensors of a model, in its order."""

    source: TensorSource
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def fp32_names(self) -> Collection[str]:
        return self.source.fp32_names

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        return self.source.read(name, start, numel)


def fitted(source: TensorSource, spec: ModelSpec, *, label: str) -> TensorSource:
    """`source` with exactly the tensors of `spec` in its order; ExportError lists what is missing, unexpected or of another shape.

    Names may also be those of published checkpoints (transformers 4 names one expert at a time). A tied tensor may be
    absent; where it is there, it must equal the tensor it is tied to, and is left out. Layers beyond the last one, which
    the class does not build, are carried over.
    """
    family = family_of(spec.model_type)
    carried = {name: shape for name, shape in source.shapes.items() if family.drops_layers_beyond and _is_beyond(name, spec)}
    left_out = {name for name in source.shapes if any(re.search(pattern, name) for pattern in family.may_be_unexpected)}
    found = {name: shape for name, shape in source.shapes.items() if name not in spec.tied.keys() | carried.keys() | left_out}
    published = {p.key: p.shape for name, shape in spec.shapes.items() for p in hub_pieces(name, shape, family)}
    wanted = published if len(published.keys() ^ found.keys()) < len(spec.shapes.keys() ^ found.keys()) else spec.shapes
    wrong = differences(wanted, found)
    if wrong:
        raise ExportError(f"{label} does not fit {spec.architecture}: {wrong}", hint="name the folder of the model it was trained from by --base")
    for name, owner in spec.tied.items():
        if name in source.shapes and not _is_equal(source, name, owner):
            raise ExportError(
                f"{label}: `{name}` differs from `{owner}`, to which the config ties it",
                hint="untie them: tie_word_embeddings false in config.json",
            )
    return _Fitted(source, {**wanted, **carried})


def _is_beyond(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor is of a layer after the last one that the class builds, as those of multi-token prediction are."""
    layers = {int(found[1]) for found in map(_LAYER.match, spec.shapes) if found}
    found = _LAYER.match(name)
    return found is not None and int(found[1]) > max(layers)


def _is_equal(source: TensorSource, name: str, other: str) -> bool:
    if source.shapes[name] != source.shapes[other]:
        return False
    numel = math.prod(source.shapes[name])
    parts = ((start, min(CHUNK_NUMEL, numel - start)) for start in range(0, numel, CHUNK_NUMEL))
    return all(torch.equal(source.read(name, *part).clone(), source.read(other, *part)) for part in parts)


def write_from(source: TensorSource, out: Path, parts: FolderParts, *, max_shard_bytes: int, workers: int) -> None:
    """Write every tensor of `source` as `parts.dtype` (fp32 for `fp32_names`), and `parts`, to `out`, which appears only when complete.

    `workers` threads each hold one chunk of `CHUNK_NUMEL` elements, read and cast, whatever the size of tensors and files.
    A NaN or infinity, also one that the cast makes, is an ExportError naming the tensor.
    """
    dtypes = {name: torch.float32 if name in source.fp32_names else parts.dtype for name in source.shapes}
    specs = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in source.shapes.items()}
    with folder_writer(specs, out, parts, max_shard_bytes=max_shard_bytes) as writer, _one_thread_each():
        _in_threads(_Copier(source, writer).copy, _chunks(specs, parts.family), workers)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Elements `start` to `start + numel` of the hub tensor `key`, whose first element is the model tensor `name`'s element `begin`."""

    name: str
    begin: int
    key: str
    start: int
    numel: int
    dtype: torch.dtype


def _chunks(specs: Mapping[str, torch.Tensor], family: Family) -> Iterator[_Chunk]:
    for name, spec in specs.items():
        shape = tuple(spec.shape)
        for piece in hub_pieces(name, shape, family):
            begin, numel = piece.first_element(shape), math.prod(piece.shape)
            for start in range(0, numel, CHUNK_NUMEL):
                yield _Chunk(name, begin, piece.key, start, min(CHUNK_NUMEL, numel - start), spec.dtype)


class _Copier(threading.local):
    """Reads, casts and writes a chunk; each thread that uses it has a buffer of its own for the cast."""

    def __init__(self, source: TensorSource, writer: ShardWriter) -> None:
        self._source, self._writer = source, writer
        self._buffer = torch.empty(0)

    def copy(self, chunk: _Chunk) -> None:
        """Do one chunk."""
        flat = self._source.read(chunk.name, chunk.begin + chunk.start, chunk.numel)
        assert flat.shape == (chunk.numel,), (chunk, flat.shape)
        cast = self._cast(flat, chunk.dtype)
        low, high = torch.aminmax(cast)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            is_read = bool(torch.isfinite(flat).all())
            raise ExportError(
                f"tensor `{chunk.key}` holds NaN or infinity {f'as {chunk.dtype}' if is_read else 'in the checkpoint'}",
                hint="export with --dtype bf16 or fp32" if is_read else "the run diverged before this checkpoint; export an older one",
            )
        self._writer.write(chunk.key, chunk.start, cast)

    def _cast(self, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if flat.dtype == dtype:
            return flat.contiguous()
        if self._buffer.dtype != dtype or self._buffer.numel() < flat.numel():
            self._buffer = torch.empty(flat.numel(), dtype=dtype)
        return self._buffer[: flat.numel()].copy_(flat)


def _in_threads(work: Callable[[_Chunk], None], chunks: Iterable[_Chunk], workers: int) -> None:
    """Do `work` for every chunk, about in order; after a failure nothing new is begun, and the first error is raised."""
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
