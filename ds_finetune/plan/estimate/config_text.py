"""config.json as one text, by which what is computed from it is remembered."""

import json
from functools import cached_property
from typing import Any

from ds_finetune.families.parameters import ModelConfig


class UnchangedConfig(dict[str, Any]):
    """A config.json that nothing changes, for many estimates of one model: its text is made once."""

    @cached_property
    def text(self) -> str:
        """The whole of it."""
        return _text(self)


def config_text(model: ModelConfig) -> str:
    """config.json as one text."""
    return model.text if isinstance(model, UnchangedConfig) else _text(model)


def _text(model: ModelConfig) -> str:
    return json.dumps(model, sort_keys=True, default=str)
