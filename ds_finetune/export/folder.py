"""Write a Hugging Face folder tensor by tensor: hub names, shards, index, config, tokenizer; complete only once it has its name."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ds_finetune.errors import ConfigError, ExportError
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


@dataclass(frozen=True, kw_only=True)
class FolderParts:
    """What lies beside the weights: `config` is the base's own config.json as read, so its schema stays; files are copied byte for byte."""

    family: Family
    config: dict[str, Any]
    architecture: str
    dtype: torch.dtype
    files: tuple[Path, ...]
    texts: dict[str, str] = field(default_factory=dict)
    """Further files by name, e.g. a generation config made from the tokenizer or a chat template given in the run file."""


def parse_bytes(text: str) -> int:
    """`5GB`, `500MB`, `2GiB` as a number of bytes; ConfigError names what was given."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)\s*", text, re.IGNORECASE)
    if not found:
        raise ConfigError(f"export.max_shard_size is `{text}`", hint="write e.g. 5GB or 500MB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def write_folder(tensors: Iterable[tuple[str, torch.Tensor | None]], out: Path, parts: FolderParts, *, max_shard_bytes: int) -> None:
    """Write `tensors` (whole, by model name, on the CPU) and `parts` to `out`, which appears under its name only when complete.

    Every rank drains `tensors`; the ranks that get None write nothing. At most one shard and one tensor are held at a time.
    """
    partial = out.with_name(out.name + ".partial")
    writer: _ShardWriter | None = None
    for name, tensor in tensors:
        if tensor is None:
            continue
        if writer is None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            writer = _ShardWriter(partial, max_shard_bytes)
        for key, piece in _pieces(name, tensor, parts.family):
            writer.add(key, piece)
    if writer is None:
        return
    writer.finish()
    _write_beside(partial, parts)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def _pieces(name: str, tensor: torch.Tensor, family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    for piece in hub_pieces(name, tuple(tensor.shape), family):
        yield piece.key, tensor[piece.index].clone(memory_format=torch.contiguous_format)


class _ShardWriter:
    """Collects tensors until a shard is full, writes it and forgets it; names are final once their number is known."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, key: str, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:
            raise ExportError(f"tensor `{key}` has shape {tuple(tensor.shape)}, without an element", hint="it was not gathered; please report this")
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self._max_bytes:
            self._flush()
        self._held[key] = tensor
        self._held_bytes += size
        self._total_bytes += size

    def finish(self) -> None:
        self._flush()
        count = len(self._shards)
        names = ["model.safetensors"] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        for number, name in enumerate(names):
            self._path(number).rename(self._folder / name)
        if count > 1:
            weight_map = {key: name for name, keys in zip(names, self._shards, strict=True) for key in keys}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        save_file(self._held, self._path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number}.safetensors"


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
