"""Loads an exported folder of any format as a model that generates text or classifies texts."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from ds_finetune.data.prompt_format import read_generation
from ds_finetune.errors import ExportError
from ds_finetune.export.classifiers import holds_classifier
from ds_finetune.export.formats import Scorer, format_of
from ds_finetune.model.build.hub_folder import check_folder, check_weight_files

_HINT = "name an exported folder, e.g. runs/r1/export"


def load_exported(folder: Path) -> PreTrainedModel:
    """Load the causal LM of `folder`, on a GPU if there is one and the format's engine supports it. ExportError if the
    folder has no config.json or weights, has a classifier, or needs packages that are not installed.
    """
    check_generates(folder)
    return format_of(folder).load_engine(folder).load_model(folder, "")


def load_scorer(folder: Path) -> Scorer:
    """Load the classifier of `folder` on a GPU, if the engine can. Raises the errors of `load_exported`."""
    check_loadable(folder)
    return format_of(folder).load_engine(folder).load_scorer(folder)


def check_generates(folder: Path) -> None:
    """Raise ExportError if `folder` has no model that this program can load, or has a classifier."""
    if folder.is_dir():
        check_folder(folder)
    check_loadable(folder)
    if holds_classifier(folder):
        names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        raise ExportError(
            f"`{folder}` has a classifier ({names[0]}), which cannot generate text",
            hint="classify texts with `ds-finetune ask`, or evaluate the classifier with `ds-finetune eval`",
        )


def check_loadable(folder: Path) -> None:
    """Raise ExportError if `folder` lacks config.json or weights, or if this program cannot run the format. DataError
    if its generation_config.json cannot be read.
    """
    format_of(folder).check_runs_here(folder)
    if not (folder / "config.json").is_file():
        raise ExportError(f"`{folder}` holds no config.json", hint=_HINT)
    if not format_of(folder).holds_weights(folder):
        raise ExportError(f"`{folder}` has a config.json but no weights", hint=_HINT)
    check_weight_files(folder)
    read_generation(folder)
