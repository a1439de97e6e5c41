"""`ds-finetune export`: a checkpoint folder to a Hugging Face folder, from what is found to what was written."""

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from ds_finetune.engine.start import DTYPES
from ds_finetune.errors import ExportError, OutputError
from ds_finetune.export.convert import ModelSpec, fitted, read_model_spec, write_from
from ds_finetune.export.folder import TOKENIZER_FILES, FolderParts
from ds_finetune.export.record import Record, prompts_of
from ds_finetune.export.shards import num_bytes
from ds_finetune.export.sources import Opened, open_source
from ds_finetune.model.families import family_of

_WORKERS_PER_CORE, _MOST_WORKERS = 2, 16
"""Threads that each hold a chunk: while some wait for the disk, others cast; beyond the limit one disk gains nothing."""
BESIDE = ("generation_config.json", *TOKENIZER_FILES)
"""Files that go with the weights byte for byte, where they are there."""
_GIB = 2**30


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    num_tensors: int
    num_bytes: int
    seconds: float


def export_checkpoint(path: Path, out: Path, *, dtype: str, max_shard_bytes: int, base: Path | None) -> Exported:
    """Convert the checkpoint in `path` to the Hugging Face folder `out` in `dtype`, a key of `DTYPES`.

    config.json and tokenizer come from `base` first, else from beside the checkpoint. ExportError where the checkpoint
    cannot be read or does not fit the config's model class, OutputError where `out` is not empty or does not fit the disk.
    """
    began = time.monotonic()
    check_out(out)
    given = _checked(base)
    opened = open_source(path, base)
    folders = (*given, *opened.folders)
    spec = read_model_spec(_config_file(folders).parent)
    source = fitted(opened.source, spec, label=str(path))
    parts = _parts(folders, spec, opened, DTYPES[dtype])
    size = sum(num_bytes(shape, torch.float32 if name in source.fp32_names else parts.dtype) for name, shape in source.shapes.items())
    check_disk(out, size)
    write_from(source, out, parts, max_shard_bytes=max_shard_bytes, workers=_workers())
    return Exported(out, len(source.shapes), size, time.monotonic() - began)


def _workers() -> int:
    return min(_WORKERS_PER_CORE * len(os.sched_getaffinity(0)), _MOST_WORKERS)


def check_out(out: Path) -> None:
    """OutputError where `out` is a file or a folder that holds something."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        held = ", ".join(sorted(entry.name for entry in out.iterdir())[:5]) if out.is_dir() else "it is a file"
        raise OutputError(f"`{out}` is not empty: {held}", hint="name a new folder, or move that one away")


def check_disk(out: Path, size: int) -> None:
    """OutputError where the disk of `out` has less than `size` bytes free."""
    existing = next(place for place in out.absolute().parents if place.exists())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise OutputError(
            f"`{out}` needs {size / _GIB:.2f} GiB and the disk has {free / _GIB:.2f} GiB free", hint="free some space or name another folder"
        )


def _checked(base: Path | None) -> tuple[Path, ...]:
    """A folder that was named is the one that is used."""
    if base is not None and not (base / "config.json").is_file():
        raise ExportError(f"--base `{base}` has no config.json", hint="name the folder of the model that was trained")
    return (base,) if base else ()


def _config_file(folders: tuple[Path, ...]) -> Path:
    found = _first(folders, "config.json")
    if found is None:
        looked = ", ".join(map(str, folders))
        raise ExportError(f"no config.json in {looked}", hint="name the folder of the model it was trained from by --base")
    return found


def _first(folders: tuple[Path, ...], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _parts(folders: tuple[Path, ...], spec: ModelSpec, opened: Opened, dtype: torch.dtype) -> FolderParts:
    beside = (_first(folders, name) for name in BESIDE)
    return FolderParts(
        family=family_of(spec.model_type),
        config=json.loads(_config_file(folders).read_text(encoding="utf-8")),
        architecture=spec.architecture,
        dtype=dtype,
        files=tuple(file for file in beside if file is not None),
        record=opened.record or _record_without_logits(folders, dtype),
        texts=dict(opened.texts),
    )


def _record_without_logits(folders: tuple[Path, ...], dtype: torch.dtype) -> Record:
    """No live model gave logits: the folder is held against the sums of its tensors, and must load and give finite logits."""
    folder = _config_file(folders).parent
    vocab_size = int(AutoConfig.from_pretrained(folder, trust_remote_code=False).vocab_size)
    return Record(str(folder.absolute()), str(dtype).removeprefix("torch."), vocab_size, prompts_of(vocab_size, None))
