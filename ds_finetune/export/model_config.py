"""The configuration files of an exported folder: the base's own keys, and those that other versions of readers look
for.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from ds_finetune.families.family import Family, layer_of

PREDICTION_LAYERS = "num_nextn_predict_layers"
"""Key that says how many multi-token prediction layers follow the last one (DeepSeek-V3's config.json)."""
CODE = "auto_map"
"""Key that names classes in Python files beside it, which are not exported."""
TOKENIZER_CONFIG = "tokenizer_config.json"


def served_config(config: Mapping[str, Any], family: Family, keys: Collection[str]) -> dict[str, Any]:
    """`config` as read from a config.json, for a folder that holds the tensors `keys` in an unquantised dtype.

    Without `auto_map`: transformers has the class, from which the tensors were checked, and readers would look for
    the code. Keys of `family` are added where there are none; rotary settings are there in both schemas; prediction
    layers are as many as the tensors hold, where the config or they name some.
    """
    served = dict(config)
    served.pop("quantization_config", None)
    served.pop(CODE, None)
    for key, value in family.export_config.items():
        served.setdefault(key, value)
    if not family.is_generic:
        _add_rope_schemas(served)
    found = prediction_layers(config, keys)
    if found or PREDICTION_LAYERS in served:
        served[PREDICTION_LAYERS] = found
    return served


def served_tokenizer(file: Path) -> str | None:
    """A tokenizer_config.json without its `auto_map`, where transformers has the class; None where it stays as it
    is.
    """
    config = _with_code(file)
    if not config or tokenizer_class_from_name(str(config.get("tokenizer_class"))) is None:
        return None
    return json.dumps({key: value for key, value in config.items() if key != CODE}, indent=2, ensure_ascii=False) + "\n"


def code_lines(config: Mapping[str, Any], files: Iterable[Path]) -> list[str]:
    """Notes on the code that `config` and the tokenizer_config.json among `files` name, and that is not exported."""
    dropped = f"without {CODE}, since transformers has the class and the code is not exported"
    kept = f"{CODE} names code that is not exported, and transformers has no such class; copy it from"
    lines = [f"config.json: {dropped}"] if CODE in config else []
    for file in (file for file in files if file.name == TOKENIZER_CONFIG and _with_code(file)):
        has_class = served_tokenizer(file) is not None
        lines.append(f"{TOKENIZER_CONFIG}: {dropped}" if has_class else f"{TOKENIZER_CONFIG}: {kept} {file.parent}")
    return lines


def forget_code(folder: Path) -> None:
    """Rewrite the configuration files of `folder` without code that is not in it, where they name some."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.pop(CODE, None) is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tokenizer = folder / TOKENIZER_CONFIG
    if tokenizer.is_file() and (text := served_tokenizer(tokenizer)) is not None:
        tokenizer.write_text(text, encoding="utf-8")


def _with_code(file: Path) -> dict[str, Any]:
    """The content of a tokenizer_config.json that names code; empty where it names none."""
    config = json.loads(file.read_text(encoding="utf-8"))
    return config if isinstance(config, dict) and CODE in config else {}


def prediction_layers(config: Mapping[str, Any], keys: Collection[str]) -> int:
    """How many layers past the last one of the model the tensors `keys` are of."""
    layers = config.get("num_hidden_layers")
    return 0 if layers is None else len({layer for layer in map(layer_of, keys) if layer >= layers})


def _add_rope_schemas(config: dict[str, Any]) -> None:
    """Add `rope_parameters`, which transformers 5 reads, where there is `rope_theta` or `rope_scaling`, which others
    read, and the other way round.

    transformers 5.23 takes `rope_scaling` first, then `rope_parameters` (modeling_rope_utils.py:775), and writes
    the second alone; vLLM, SGLang and DeepSeek's own code of 2024 know the first, the last by the key `type`.
    """
    given = config.get("rope_parameters")
    if isinstance(given, dict) and not any(isinstance(value, dict) for value in given.values()):
        scaling = {key: value for key, value in given.items() if key not in ("rope_theta", "partial_rotary_factor")}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        config.update(
            {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if key in given and key not in config}
        )
        config.setdefault("rope_scaling", None if kind == "default" else {**scaling, "type": kind, "rope_type": kind})
    elif given is None and (config.get("rope_theta") is not None or config.get("rope_scaling")):
        scaling = config.get("rope_scaling") or {}
        theta = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {}
        config["rope_parameters"] = {
            **scaling,
            "rope_type": scaling.get("rope_type", scaling.get("type", "default")),
            **theta,
        }
