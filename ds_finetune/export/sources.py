"""What a folder given to `export` is: a table of kinds, each recognised by its files and opened as one `TensorSource`."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ds_finetune.checkpoint.files import MANIFEST, complete_steps
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.tools import BASE, CHECKPOINTS, find_checkpoint, verify
from ds_finetune.errors import ExportError
from ds_finetune.export.base import HubSource, base_of_run
from ds_finetune.export.convert import TensorSource
from ds_finetune.export.native import is_native, read_native
from ds_finetune.export.parts import CheckpointSource
from ds_finetune.model.families import family_of
from ds_finetune.model.hub_folder import HubFolder, has_weights


@dataclass(frozen=True)
class Opened:
    """A source, the folders where its config.json and tokenizer may lie (the first that has a file gives it), and further files as text."""

    source: TensorSource
    folders: tuple[Path, ...]
    texts: Mapping[str, str] = field(default_factory=dict)
    hub: HubFolder | None = None
    """The folder, where it is a whole model with its own config.json and tokenizer."""
    base: Path | None = None
    """The folder of the model that it was trained from, where that is known and here."""
    why_no_base: str = "no --base was given"


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
    model = RunState.read(folder).config["model"]
    base = base_of_run(model["path"]) if model["weights"] != "random" else None
    why = (
        "its weights were drawn afresh" if model["weights"] == "random" else f"the weights of {model['path']} are not here (--base FOLDER names them)"
    )
    return Opened(CheckpointSource(folder), (folder / BASE,), base=base, why_no_base=why)


def open_model(path: Path) -> Opened:
    """A folder of published weights with its config.json, in FP8 too; ModelError where a file of it is missing or torn."""
    try:
        model_type = str(json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (ValueError, KeyError, TypeError) as broken:
        raise ExportError(f"{path}/config.json is not that of a model: {broken!r}", hint="take the config.json published with it") from broken
    hub = HubFolder(path)
    return Opened(HubSource(hub, family_of(model_type)), (path,), hub=hub)


def is_model(path: Path) -> bool:
    """Whether `path` holds published weights beside a config.json."""
    return (path / "config.json").is_file() and has_weights(path)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint, or holds some."""
    return (path / MANIFEST).is_file() or any(complete_steps(folder) for folder in (path, path / CHECKPOINTS))


KINDS = (
    Kind("a run or a checkpoint of one (manifest.json)", is_checkpoint, open_checkpoint),
    Kind("a DeepSpeed checkpoint (`latest`, or *_states.pt files)", is_native, open_native),
    Kind("a model (config.json and *.safetensors)", is_model, open_model),
)


def open_source(path: Path) -> Opened:
    """The checkpoint or model in `path`; ExportError where it is none of `KINDS`."""
    if not path.is_dir():
        raise ExportError(f"`{path}` is not a folder", hint="name the folder of a run, a checkpoint or a model")
    for kind in KINDS:
        if kind.is_here(path):
            return kind.open(path)
    held = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
    raise ExportError(f"`{path}` holds no checkpoint: {held}", hint=f"name a folder that holds {' or '.join(kind.name for kind in KINDS)}")
