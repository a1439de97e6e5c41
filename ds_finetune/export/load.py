"""Load an exported folder, of any format, as a model that generates or classifies."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from ds_finetune.errors import ExportError
from ds_finetune.export.classifiers import holds_classifier
from ds_finetune.export.formats import Scorer, format_of
from ds_finetune.model.build.hub_folder import check_folder, check_index

_HINT = "name an exported folder, e.g. runs/r1/export"


def load_exported(folder: Path) -> PreTrainedModel:
    """The causal LM of `folder`, on a GPU if there is one and the format's engine supports it.

    ExportError where the folder has no config.json or no weights, has a classifier, or needs packages that are not
    installed.
    """
    check_generates(folder)
    return format_of(folder).load_engine(folder).load_model(folder, "")


def load_scorer(folder: Path) -> Scorer:
    """The classifier of `folder`; device and errors as in `load_exported`."""
    check_loadable(folder)
    return format_of(folder).load_engine(folder).load_scorer(folder)


def check_generates(folder: Path) -> None:
    """ExportError where `folder` has no loadable model, or a classifier, which generates no text."""
    if folder.is_dir():
        check_folder(folder)
    check_loadable(folder)
    if holds_classifier(folder):
        names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        raise ExportError(
            f"`{folder}` holds a {names[0]}, which scores texts and generates none",
            hint="`ds-finetune ask` prints the classes of texts, `ds-finetune eval` scores it on held-out rows",
        )


def check_loadable(folder: Path) -> None:
    """ExportError where `folder` has no config.json, no weights in a known format, or weights that do not run here."""
    format_of(folder).check_runs_here(folder)
    if not (folder / "config.json").is_file():
        raise ExportError(f"`{folder}` holds no config.json", hint=_HINT)
    if not format_of(folder).holds_weights(folder):
        raise ExportError(f"`{folder}` holds a config.json and no weights", hint=_HINT)
    check_index(folder)
