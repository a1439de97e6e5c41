"""With which settings the inputs of recomputed layers are kept in host memory."""

from collections.abc import Mapping
from typing import Any

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.table import FAMILIES

_OFFLOADED = tuple(name for name, family in FAMILIES.items() if family.tiny_models is not None)
"""Model types with which tests compare it."""


def check_activation_offload(config: RunConfig, *, device: str) -> None:
    """ConfigError where the inputs of layers are in host memory anyway."""
    if config.train.activation_offload and device == "cpu":
        raise ConfigError(
            f"train.activation_offload true with device {device}: activations are in host memory already",
            hint="leave it out, or train on a GPU",
        )


def check_offloaded_type(config: RunConfig, model: Mapping[str, Any]) -> None:
    """ConfigError where no test covers the offload with the type of the model, whose config.json is given."""
    kind = str(model.get("model_type"))
    if config.train.activation_offload and kind not in _OFFLOADED:
        raise ConfigError(
            f"train.activation_offload true of model_type {kind} is not tested",
            hint=f"leave it out; tested: {', '.join(_OFFLOADED)}",
        )
