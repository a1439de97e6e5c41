"""Configuration files of an exported folder: the base model's files, with more keys for vLLM and SGLang."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from ds_finetune.errors import ModelError
from ds_finetune.families.family import Family, layer_of
from ds_finetune.families.layer_rules import published_layers
from ds_finetune.families.text_part import is_composite
from ds_finetune.model.build.hub_folder import check_inside, copy_model_file
from ds_finetune.model.mtp import PREDICTION_LAYERS

CODE = "auto_map"
"""Key of config.json and tokenizer_config.json that names Python classes in the folder. Code is not exported."""
TOKENIZER_CONFIG = "tokenizer_config.json"
NAMED_TEMPLATES = "additional_chat_templates"
"""Subfolder with further chat templates, such as one for requests with tools."""
_KEYS_OF_KINDS = ("layer_types", "mlp_layer_types", "compress_rates")
"""Keys that transformers 5.23 adds to DeepSeek-V4's config.json; exports lack them, because vLLM rejects them."""
_UNSCALED_KEYS = ("rope_theta", "partial_rotary_factor")
"""Keys of `rope_parameters` that older versions of config.json have at top level, not in `rope_scaling`."""


def served_config(config: Mapping[str, Any], family: Family, keys: Collection[str]) -> dict[str, Any]:
    """Make the config.json of an exported folder with the tensors `keys` from the base model's `config`, without
    quantisation keys.

    `auto_map` is removed, because transformers has the class and the code is not exported. Missing keys that `family`
    needs are added, and rotary settings are written under old and new keys. `num_nextn_predict_layers` is set to the
    number of multi-token prediction layers among `keys`. If the model combines text with images or sound, only
    quantisation keys and `auto_map` are removed.
    """
    served = {key: value for key, value in config.items() if key not in ("quantization_config", "expert_dtype", CODE)}
    if is_composite(config):
        return served
    served |= {key: value for key, value in family.export_config.items() if served.get(key) is None}
    if family.compresses:
        served |= {key: value for key, value in published_layers(config).items() if served.get(key) is None}
        if "compress_ratios" in served:
            served = {key: value for key, value in served.items() if key not in _KEYS_OF_KINDS}
    numbers = family.expert_keys.number_keys if family.expert_keys is not None else ()
    if given := [served[key] for key in numbers if key in served]:
        # transformers renames the key for the number of experts, but other programs read the published key.
        served.setdefault(numbers[0], given[0])
    if not family.is_generic:
        _add_rope_schemas(served)
    count = _prediction_layers(config, keys)
    if count or PREDICTION_LAYERS in served:
        served[PREDICTION_LAYERS] = count
    return served


def served_tokenizer(file: Path) -> str | None:
    """Text of a tokenizer_config.json without `auto_map`; None if the file stays unchanged: it names no Python
    code, or transformers has no class that replaces the code.
    """
    config = _config_with_code(file)
    if not config or tokenizer_class_from_name(str(config.get("tokenizer_class"))) is None:
        return None
    return json.dumps({key: value for key, value in config.items() if key != CODE}, indent=2, ensure_ascii=False) + "\n"


def write_files(folder: Path, files: Iterable[Path], texts: Mapping[str, str]) -> None:
    """Copy tokenizer and generation `files` to `folder`, and write `texts` by file name. A text replaces the file of
    the same name. A tokenizer_config.json is changed by `served_tokenizer`.
    """
    for file in (file for file in files if file.name not in texts):
        text = served_tokenizer(check_inside(file)) if file.name == TOKENIZER_CONFIG else None
        out = folder / (file.parent.name if file.parent.name == NAMED_TEMPLATES else "") / file.name
        out.parent.mkdir(exist_ok=True)
        if text is None:
            copy_model_file(file, out)
        else:
            out.write_text(text, encoding="utf-8")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def config_changes(config: Mapping[str, Any], files: Iterable[Path], keys: Collection[str]) -> list[str]:
    """Notes for the user on differences between the exported configuration and the base model's: prediction layers, and
    Python code that `auto_map` names. `config` and `files` are the base model's config.json and other files; `keys` are
    the tensors to be written.
    """
    configured, written = config.get(PREDICTION_LAYERS), _prediction_layers(config, keys)
    lines = []
    if configured is not None and configured != written:
        lines.append(f"config.json: {PREDICTION_LAYERS} {configured} -> {written}, as many as have tensors")
    dropped = f"without {CODE}, since transformers has the class and the code is not exported"
    unknown = f"{CODE} names code that is not exported, and transformers has no such class; copy it from"
    lines += [f"config.json: {dropped}"] if CODE in config else []
    for file in (file for file in files if file.name == TOKENIZER_CONFIG and _config_with_code(file)):
        has_class = served_tokenizer(file) is not None
        lines.append(f"{TOKENIZER_CONFIG}: {dropped}" if has_class else f"{TOKENIZER_CONFIG}: {unknown} {file.parent}")
    return lines


def _config_with_code(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise ModelError(f"{file} is not JSON: {broken}", hint="take the file published with the model") from broken
    return config if isinstance(config, dict) and CODE in config else {}


def _prediction_layers(config: Mapping[str, Any], keys: Collection[str]) -> int:
    """Count the multi-token prediction layers among the tensors `keys`. They are numbered from `num_hidden_layers` on,
    or named `mtp.0`, `mtp.1`, ... in DeepSeek-V4.
    """
    layers = config.get("num_hidden_layers")
    mtp_numbers = {number[0] for number in (re.match(r"mtp\.\d+\.", key) for key in keys) if number}
    return 0 if layers is None else len({layer for layer in map(layer_of, keys) if layer >= layers} | mtp_numbers)


def _add_rope_schemas(config: dict[str, Any]) -> None:
    """Add `rope_parameters` to config.json if it has only `rope_theta` or `rope_scaling`, and vice versa.

    transformers 5.23 reads `rope_scaling` first, then `rope_parameters` (modeling_rope_utils.py:775), and writes only
    `rope_parameters`. vLLM, SGLang and DeepSeek's own code of 2024 read `rope_scaling`; DeepSeek's code expects its key
    `type`.
    """
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and not any(isinstance(value, dict) for value in parameters.values()):
        scaling = {key: value for key, value in parameters.items() if key not in _UNSCALED_KEYS}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        config.update({key: parameters[key] for key in _UNSCALED_KEYS if key in parameters and key not in config})
        config.setdefault("rope_scaling", None if kind == "default" else {**scaling, "type": kind, "rope_type": kind})
    elif parameters is None and (config.get("rope_theta") is not None or config.get("rope_scaling")):
        scaling = config.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        unscaled = {key: config[key] for key in _UNSCALED_KEYS if config.get(key) is not None}
        config["rope_parameters"] = {**scaling, "rope_type": kind, **unscaled}
