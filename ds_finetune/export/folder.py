"""Write a Hugging Face folder tensor by tensor: hub names, shards, index, config, tokenizer; complete only once it has its name."""

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ds_finetune.errors import ConfigError, ExportError
from ds_finetune.export.record import Record, mark_unchecked
from ds_finetune.export.shards import HubTensor, ShardWriter, plan_shards, synchronise
from ds_finetune.model.families import Family
from ds_finetune.model.names import hub_pieces

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

Specs = Mapping[str, torch.Tensor]
"""What will be written, by model name in order: shape and dtype as a tensor on the meta device."""


@dataclass(frozen=True, kw_only=True)
class FolderParts:
    """What lies beside the weights: `config` is the base's own config.json as read, so its schema stays; files are copied byte for byte."""

    family: Family
    config: dict[str, Any]
    architecture: str
    dtype: torch.dtype
    files: tuple[Path, ...]
    record: Record | None = None
    """What the folder will be held against; None writes no record."""
    texts: dict[str, str] = field(default_factory=dict)
    """Further files by name, e.g. a generation config made from the tokenizer or a chat template given in the run file."""


def parse_bytes(text: str, *, name: str = "export.max_shard_size") -> int:
    """`5GB`, `500MB`, `2GiB` as a number of bytes; ConfigError says what `name` was given as."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)\s*", text, re.IGNORECASE)
    if not found:
        raise ConfigError(f"{name} is `{text}`", hint="write e.g. 5GB or 500MB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def write_folder(tensors: Iterable[tuple[str, torch.Tensor | None]], specs: Specs, out: Path, parts: FolderParts, *, max_shard_bytes: int) -> None:
    """Write `tensors` (whole, by model name, on the CPU) and `parts` to `out`, which appears under its name only when complete.

    `specs` says in advance what `tensors` will yield. Every rank drains `tensors`; the ranks that get None write nothing.
    One tensor is held at a time, and no copy of it is made.
    """
    with ExitStack() as stack:
        writer: ShardWriter | None = None
        for name, tensor in tensors:
            if tensor is not None:
                writer = writer or stack.enter_context(folder_writer(specs, out, parts, max_shard_bytes=max_shard_bytes))
                _write_whole(writer, name, tensor, specs[name], parts.family)
            # The next tensor is gathered before this name is bound to it.
            del tensor


def _write_whole(writer: ShardWriter, name: str, tensor: torch.Tensor, spec: torch.Tensor, family: Family) -> None:
    if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
        raise ExportError(
            f"tensor `{name}` has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, expected {tuple(spec.shape)} and {spec.dtype}",
            hint="it was not gathered; please report this",
        )
    shape, flat = tuple(tensor.shape), tensor.contiguous().view(-1)
    for piece in hub_pieces(name, shape, family):
        begin = piece.first_element(shape)
        writer.write(piece.key, 0, flat[begin : begin + math.prod(piece.shape)])


@contextmanager
def folder_writer(specs: Specs, out: Path, parts: FolderParts, *, max_shard_bytes: int) -> Iterator[ShardWriter]:
    """The writer of the hub tensors that `specs` become; when the context closes without an error, `out` is whole and has its name.

    Everything is written to `out`.partial and synchronised to the disk before it takes the place of an older `out`.
    """
    hub = (HubTensor(p.key, p.shape, spec.dtype) for name, spec in specs.items() for p in hub_pieces(name, tuple(spec.shape), parts.family))
    shards = plan_shards(hub, max_shard_bytes)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with closing(ShardWriter(partial, shards)) as writer:
        yield writer
        writer.finish()
    _write_beside(partial, parts)
    if parts.record is not None:
        parts.record.with_digests(writer.digests()).write(partial)
        mark_unchecked(partial)
    for path in (*partial.iterdir(), partial):
        synchronise(path)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    synchronise(out.parent)


def _write_beside(folder: Path, parts: FolderParts) -> None:
    config = dict(parts.config)
    config.pop("quantization_config", None)
    config.setdefault("architectures", [parts.architecture])
    config["dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"] = _DTYPE_NAMES[parts.dtype]
    for key, value in parts.family.export_config.items():
        config.setdefault(key, value)
    (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for file in parts.files:
        shutil.copyfile(file, folder / file.name)
    for name, text in parts.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
