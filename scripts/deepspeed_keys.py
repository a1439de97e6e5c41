"""Write `ds_finetune/plan/deepspeed_keys.json` from the installed DeepSpeed: the keys of its sections, and their types.

Planning reads the file, because importing DeepSpeed takes seconds. Deprecated keys are left out.
"""

import json
from pathlib import Path
from typing import get_args

from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

FILE = Path(__file__).parents[1] / "ds_finetune" / "plan" / "deepspeed_keys.json"
_MODELS = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}


def text() -> str:
    """The file: by section, each key with int, float or bool, or `other`."""
    sections: dict[str, dict[str, str]] = {}
    for name, model in _MODELS.items():
        _add(sections, name, model)
    return json.dumps(sections, indent=1) + "\n"


def _add(sections: dict[str, dict[str, str]], name: str, model: type) -> None:
    """Add the section `name`, whose pydantic model is given, and those inside it."""
    keys = sections[name] = {}
    for field_name, field in model.model_fields.items():
        if (field.json_schema_extra or {}).get("deprecated"):
            continue
        kinds = {field.annotation, *get_args(field.annotation)}
        declared = [kind.__name__ for kind in (bool, int, float) if kind in kinds]
        assert len(declared) < 2, f"{name}.{field_name} is {field.annotation}"
        for key in filter(None, (field_name, field.alias)):
            keys[key] = declared[0] if declared else "other"
        for kind in kinds:
            if hasattr(kind, "model_fields"):
                _add(sections, f"{name}.{field_name}", kind)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
