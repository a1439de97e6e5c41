"""Checks whether the quantised format that config.json names in `quantization_config` can be read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_finetune.errors import FinetuneError
from ds_finetune.model.quantised.fp8 import BLOCK, QUANTIZATION_CONFIG
from ds_finetune.model.quantised.mxfp4 import QUANT_METHOD

MODEL_OPTIMIZER_FILE = "hf_quant_config.json"
EXPERT_DTYPE, FP4 = "expert_dtype", "fp4"
_SCALE_FORMATS = (None, "float", "ue8m0")
_HINT = (
    f"give a copy in bf16, in FP8 with weight_block_size [{BLOCK}, {BLOCK}] and quant_method fp8, or in gpt-oss' MXFP4"
)


def check_config_readable(config: Mapping[str, Any], label: str, error: type[FinetuneError]) -> None:
    """Raise `error` if a published config.json names a quantised format that is not supported.

    `expert_dtype` is part of the format (transformers 5.23, deepseek_v4/configuration_deepseek_v4.py:247-255).
    """
    section = config.get("quantization_config")
    if isinstance(section, Mapping) and config.get(EXPERT_DTYPE) is not None:
        section = {EXPERT_DTYPE: config[EXPERT_DTYPE], **section}
    if section is not None:
        check_readable(section, label, error)


def check_no_other_format(folder: Path, error: type[FinetuneError]) -> None:
    """Raise `error` if the folder has a file of NVIDIA's Model Optimizer that names a quantised format.

    NVFP4 is published with such a file (nvidia/DeepSeek-V3.1-NVFP4), while config.json does not name the format.
    """
    file = folder / MODEL_OPTIMIZER_FILE
    if not file.is_file():
        return
    try:
        section = dict(json.loads(file.read_text(encoding="utf-8"))).get("quantization")
        kind = dict(section or {}).get("quant_algo")
    except (ValueError, TypeError) as broken:
        raise error(f"{file} cannot be read: {broken!r}", hint="download the file again") from broken
    if kind:
        raise error(f"{file}: weights in {kind} are not supported", hint=_HINT)


def check_readable(section: Any, label: str, error: type[FinetuneError]) -> None:  # noqa: ANN401 - whatever a config.json holds
    """Raise `error` if a `quantization_config` names a format that is not supported. `label` names its file.

    Supported are FP8 in blocks (`model/quantised/fp8.py`), also with FP4 experts, and MXFP4
    (`model/quantised/mxfp4.py`).
    """
    tree = section if isinstance(section, Mapping) else {}
    if tree.get("quant_method") == QUANT_METHOD:
        return
    if tree.get("quant_method") == "fp8" and tree.get(EXPERT_DTYPE, "fp8") not in ("fp8", FP4):
        raise error(f"{label}: experts in {tree[EXPERT_DTYPE]} are not supported", hint=_HINT)
    read = {key: tree.get(key, QUANTIZATION_CONFIG[key]) for key in ("fmt", "quant_method", "weight_block_size")}
    is_fp8 = tree.get("quant_method") is not None and all(read[key] == QUANTIZATION_CONFIG[key] for key in read)
    if not is_fp8 or tree.get("scale_fmt") not in _SCALE_FORMATS:
        raise error(f"{label}: weights quantised by {section} are not supported", hint=_HINT)
