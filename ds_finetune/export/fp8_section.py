"""The `quantization_config` of an exported folder in FP8: which of the base's are written again, and what is added."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ds_finetune.errors import ExportError
from ds_finetune.export.shards import HubTensor
from ds_finetune.model.quantised.fp8 import FP8, QUANTIZATION_CONFIG

SECTION = "quantization_config"
_SCALE_FORMAT, _POWERS_OF_TWO = "scale_fmt", "ue8m0"
_SCALE_FORMATS = (None, "float", _POWERS_OF_TWO)
_NOT_CONVERTED = ("modules_to_not_convert", "ignored_layers")
"""Keys that list modules whose weights are not in FP8; a config.json has one of them, or none."""
_MATRIX = 2
_WEIGHT = ".weight"


def writable_section(config: Mapping[str, Any], file: Path) -> Mapping[str, Any] | None:
    """The `quantization_config` of a base's config.json, which was read from `file`; None where it has none.

    ExportError where it is of a format that is not written.
    """
    given = config.get(SECTION)
    if given is None:
        return None
    section: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    differs = any(section.get(key) != value for key, value in QUANTIZATION_CONFIG.items())
    if differs or section.get(_SCALE_FORMAT) not in _SCALE_FORMATS:
        raise ExportError(
            f"{file}: {SECTION} {given} differs from the only one that can be written, "
            f"{dict(QUANTIZATION_CONFIG)}, with {_SCALE_FORMAT} {_POWERS_OF_TWO} or without",
            hint="export with --dtype bf16",
        )
    return section


def section_of(folder: Path) -> Mapping[str, Any] | None:
    """`writable_section` of the config.json in a base's folder; None where it has no such file."""
    file = folder / "config.json"
    return writable_section(json.loads(file.read_text(encoding="utf-8")), file) if file.is_file() else None


def has_scales_of_two(section: Mapping[str, Any] | None) -> bool:
    """Whether the scales of a base are powers of two (UE8M0); `section` is its `quantization_config`."""
    return section is not None and section.get(_SCALE_FORMAT) == _POWERS_OF_TWO


def section_for(tensors: Collection[HubTensor], base: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `quantization_config` of a folder that holds `tensors`; `base` is that of the base.

    It is the base's, where that is in FP8. Otherwise it lists each module with a matrix that is not in FP8: servers
    expect the router of Qwen3's experts, a linear layer to them, in FP8 where it is not listed. A module of the base's
    list that is written in FP8 is left out.
    """
    if base is None:
        return {**QUANTIZATION_CONFIG, _NOT_CONVERTED[0]: _plain_modules(tensors)}
    section = {**QUANTIZATION_CONFIG}
    section |= {key: base[key] for key in (_SCALE_FORMAT, *_NOT_CONVERTED) if base.get(key) is not None}
    in_fp8 = {tensor.key.removesuffix(_WEIGHT) for tensor in tensors if tensor.dtype == FP8}
    for key in _NOT_CONVERTED:
        if key in section:
            section[key] = [module for module in section[key] if module not in in_fp8]
    return section


def _plain_modules(tensors: Iterable[HubTensor]) -> list[str]:
    return [
        tensor.key.removesuffix(_WEIGHT)
        for tensor in tensors
        if tensor.key.endswith(_WEIGHT) and len(tensor.shape) == _MATRIX and tensor.dtype != FP8
    ]
