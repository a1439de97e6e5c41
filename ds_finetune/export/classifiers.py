"""Exported text classifiers: models with a classification head instead of a language-model head.

A decoder classifies a text by its last token, BERT by its first token, ModernBERT by its configured pooling. For a
decoder, transformers 5.23 takes the last token that is not `pad_token_id` (modeling_layers.py:186), whatever the
attention mask says. So the padding token must never be the token that ends a text.
"""

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ds_finetune.families.text_part import TEXT_CONFIG
from ds_finetune.foreign.auto_models import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
)
from ds_finetune.model.loss.score_config import is_classifier

CONFIG = "config.json"


def holds_classifier(folder: Path) -> bool:
    """Whether `folder` has the config.json of a classifier."""
    file = folder / CONFIG
    return file.is_file() and is_classifier(json.loads(file.read_text(encoding="utf-8")))


def auto_class(config: PretrainedConfig) -> Any:  # noqa: ANN401 - transformers' factories share no type
    """transformers' Auto class that loads the full model of `config`, with its parts for images and sound, if any."""
    if hasattr(config, TEXT_CONFIG):
        return AutoModelForMultimodalLM
    return AutoModelForSequenceClassification if is_classifier(config) else AutoModelForCausalLM
