"""Where activations are kept and how much of them at once: which settings are tested, and the tiles of an MLP."""

import math
from collections.abc import Mapping
from typing import Any

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import TrainConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.table import WITH_TINY_MODELS, family_of


def check_activations(config: RunConfig, *, device: str) -> None:
    """ConfigError where the inputs of layers are in host memory anyway, or no test covers a setting with another."""
    quantize = config.lora.quantize if config.lora is not None else None
    others = (
        ("mtp.train true", config.mtp.train),
        ("indexer.train true", config.indexer.train),
        (f"lora.quantize {quantize}", quantize is not None),
    )
    for key in ("activation_offload", "tiled_mlp"):
        for other, is_set in others:
            if is_set and getattr(config.train, key):
                raise ConfigError(f"train.{key} true with {other} is not tested", hint=f"leave train.{key} out")
    if config.train.activation_offload and device == "cpu":
        raise ConfigError(
            f"train.activation_offload true with device {device}: activations are in host memory already",
            hint="leave it out, or train on a GPU",
        )


def check_model_type(train: TrainConfig, model: Mapping[str, Any]) -> None:
    """ConfigError where no test covers a setting with the type of the model, whose config.json is given."""
    kind = str(model.get("model_type"))
    for key in ("activation_offload", "tiled_mlp"):
        if getattr(train, key) and kind not in WITH_TINY_MODELS:
            raise ConfigError(
                f"train.{key} true of model_type {kind} is not tested",
                hint=f"leave it out; tested: {', '.join(WITH_TINY_MODELS)}",
            )


def mlp_tiles(model: Mapping[str, Any]) -> int:
    """Into how many tiles the tokens of a forward are divided, from the config.json of a model.

    So many that what one tile keeps within its MLP is no more than one hidden state of every token. The number does not
    depend on the tokens, so that all ranks have as many.
    """
    dense = 4 * model["intermediate_size"]
    keys = family_of(str(model["model_type"])).expert_keys
    experts = keys.per_token(model) * (2 * model["hidden_size"] + 4 * keys.width(model)) if keys else 0
    return max(1, math.ceil(max(dense, experts) / model["hidden_size"]))
