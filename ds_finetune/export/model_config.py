"""The config.json of an exported folder: the base's own keys, and what readers of other ages look for beside them."""

from collections.abc import Collection, Mapping
from typing import Any

from ds_finetune.model.families import Family, layer_of

PREDICTION_LAYERS = "num_nextn_predict_layers"
"""Key that says how many multi-token prediction layers follow the last one (DeepSeek-V3's config.json)."""


def served_config(config: Mapping[str, Any], family: Family, keys: Collection[str]) -> dict[str, Any]:
    """`config` as read from a config.json, for a folder that holds the tensors `keys` in an unquantised dtype.

    Keys of `family` are added where there are none; rotary settings are there in both schemas; prediction layers are as many
    as the tensors hold, where the config or they name some.
    """
    served = dict(config)
    served.pop("quantization_config", None)
    for key, value in family.export_config.items():
        served.setdefault(key, value)
    if not family.is_generic:
        _add_rope_schemas(served)
    found = prediction_layers(config, keys)
    if found or PREDICTION_LAYERS in served:
        served[PREDICTION_LAYERS] = found
    return served


def prediction_layers(config: Mapping[str, Any], keys: Collection[str]) -> int:
    """How many layers past the last one of the model the tensors `keys` are of."""
    layers = config.get("num_hidden_layers")
    return 0 if layers is None else len({layer for layer in map(layer_of, keys) if layer >= layers})


def _add_rope_schemas(config: dict[str, Any]) -> None:
    """Add `rope_parameters`, which transformers 5 reads, where there is `rope_theta` or `rope_scaling`, which others read, and the other way round.

    transformers 5.23 takes `rope_scaling` first, then `rope_parameters` (modeling_rope_utils.py:775), and writes the second
    alone; vLLM, SGLang and DeepSeek's own code of 2024 know the first, the last by the key `type`.
    """
    given = config.get("rope_parameters")
    if isinstance(given, dict) and not any(isinstance(value, dict) for value in given.values()):
        scaling = {key: value for key, value in given.items() if key not in ("rope_theta", "partial_rotary_factor")}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        config.update({key: given[key] for key in ("rope_theta", "partial_rotary_factor") if key in given and key not in config})
        config.setdefault("rope_scaling", None if kind == "default" else {**scaling, "type": kind, "rope_type": kind})
    elif given is None and (config.get("rope_theta") is not None or config.get("rope_scaling")):
        scaling = config.get("rope_scaling") or {}
        theta = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {}
        config["rope_parameters"] = {**scaling, "rope_type": scaling.get("rope_type", scaling.get("type", "default")), **theta}
