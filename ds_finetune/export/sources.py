"""What a folder given to `export` is: a table of kinds, each recognised by its files and opened as one `TensorSource`."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ds_finetune.checkpoint.files import MANIFEST, complete_steps, step_name
from ds_finetune.checkpoint.tools import BASE, CHECKPOINTS, find_checkpoint, verify
from ds_finetune.errors import ExportError
from ds_finetune.export.convert import TensorSource
from ds_finetune.export.native import is_native, read_native
from ds_finetune.export.parts import CheckpointSource
from ds_finetune.export.record import RECORD, Record


@dataclass(frozen=True)
class Opened:
    """A source, the folders where its config.json and tokenizer may lie (the first that has a file gives it), and further files as text."""

    source: TensorSource
    folders: tuple[Path, ...]
    texts: Mapping[str, str] = field(default_factory=dict)
    record: Record | None = None
    """Logits that the run had of these very weights, where it kept them."""


@dataclass(frozen=True)
class Kind:
    """One kind of checkpoint: what to call it, how to recognise a folder of it, how to open one."""

    name: str
    is_here: Callable[[Path], bool]
    open: Callable[[Path], Opened]


def open_native(path: Path) -> Opened:
    """A checkpoint of DeepSpeed's own; config.json lies beside it where the Hugging Face Trainer wrote it."""
    return Opened(read_native(path), (path,) if (path / "latest").is_file() else (path, path.absolute().parent))


def open_checkpoint(path: Path) -> Opened:
    """A checkpoint of a run, or the newest complete one of a run; every file is summed before any is believed."""
    folder = find_checkpoint(path)
    verify(folder, workers=os.cpu_count() or 1)
    return Opened(CheckpointSource(folder), (folder / BASE,), record=_record_of_run(folder))


def _record_of_run(checkpoint: Path) -> Record | None:
    """The record of an export that the run of `checkpoint` wrote after the same step."""
    run = checkpoint.absolute().parent.parent
    records = (Record.read(folder) for folder in (run / "export", run / "export-best") if (folder / RECORD).is_file())
    return next((record for record in records if record.step is not None and step_name(record.step) == checkpoint.name), None)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint, or holds some."""
    return (path / MANIFEST).is_file() or any(complete_steps(folder) for folder in (path, path / CHECKPOINTS))


KINDS = (
    Kind("a run or a checkpoint of one (manifest.json)", is_checkpoint, open_checkpoint),
    Kind("a DeepSpeed checkpoint (`latest`, or *_states.pt files)", is_native, open_native),
)


def open_source(path: Path) -> Opened:
    """The checkpoint in `path`; ExportError where it is none of `KINDS`."""
    if not path.is_dir():
        raise ExportError(f"`{path}` is not a folder", hint="name the folder of a checkpoint")
    for kind in KINDS:
        if kind.is_here(path):
            return kind.open(path)
    held = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
    raise ExportError(f"`{path}` holds no checkpoint: {held}", hint=f"name a folder that holds {' or '.join(kind.name for kind in KINDS)}")
