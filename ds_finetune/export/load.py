"""Loads an exported folder of any format as a model that generates text or classifies texts.

A decoder classifies a text by its last token, BERT by its first token, ModernBERT by its configured pooling. For a
decoder, transformers 5.23 takes the last token that is not `pad_token_id` (modeling_layers.py:186), whatever the
attention mask says. So the padding token must never be the token that ends a text.
"""

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from ds_finetune.data.prompt_format import GENERATION, read_generation
from ds_finetune.errors import ExportError
from ds_finetune.export.formats import Scorer, format_of
from ds_finetune.families.text_part import TEXT_CONFIG
from ds_finetune.foreign.auto_models import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
)
from ds_finetune.model.build.hub_folder import check_folder, check_weight_files
from ds_finetune.model.loss.score_config import is_classifier

_HINT = "name an exported folder, e.g. runs/r1/export"


def holds_classifier(folder: Path) -> bool:
    """Whether the config.json of `folder` is that of a classifier."""
    file = folder / "config.json"
    return file.is_file() and is_classifier(json.loads(file.read_text(encoding="utf-8")))


def auto_class(config: PretrainedConfig) -> Any:  # noqa: ANN401 - transformers' factories share no type
    """transformers' Auto class that loads the full model of `config`, with its parts for images and sound, if any."""
    if hasattr(config, TEXT_CONFIG):
        return AutoModelForMultimodalLM
    return AutoModelForSequenceClassification if is_classifier(config) else AutoModelForCausalLM


def load_exported(folder: Path) -> PreTrainedModel:
    """Load the causal LM of `folder`, on a GPU if there is one and the format's engine supports it. ExportError if the
    folder has no config.json or weights, has a classifier, or needs packages that are not installed.
    """
    check_generates(folder)
    return format_of(folder).load_engine(folder).load_model(folder, "")


def load_scorer(folder: Path) -> Scorer:
    """Load the classifier of `folder`, on a GPU if the engine can. Raises the errors of `load_exported`."""
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
    or ExportError if its generation_config.json cannot be read.
    """
    format_of(folder).check_runs_here(folder)
    if not (folder / "config.json").is_file():
        raise ExportError(f"`{folder}` holds no config.json", hint=_HINT)
    if not format_of(folder).holds_weights(folder):
        raise ExportError(f"`{folder}` has a config.json but no weights", hint=_HINT)
    check_weight_files(folder)
    if holds_classifier(folder):
        return
    try:
        GenerationConfig.from_dict(read_generation(folder))
    except (ValueError, TypeError, LookupError) as refused:
        file = folder / GENERATION
        raise ExportError(f"transformers cannot read {file}: {refused}", hint="correct it, or remove it") from refused
