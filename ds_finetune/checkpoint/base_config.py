"""Compares the config.json kept in a checkpoint with the model's at resume: keys that change results must be equal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_finetune.config.dotted_keys import set_values
from ds_finetune.errors import CheckpointError
from ds_finetune.foreign.auto_configs import CONFIG_MAPPING

_WITHOUT_EFFECT = frozenset(
    [
        "transformers_version",
        "_name_or_path",
        "architectures",
        "auto_map",
        # Keys that the run sets itself: train.precision, model.attention, and a cache that is off.
        "dtype",
        "torch_dtype",
        "_attn_implementation",
        "use_cache",
        # Weights come from the checkpoint; adapters identify their base weights by a digest.
        "quantization_config",
        "initializer_range",
        # Outputs of a forward, and settings of tasks other than language modelling.
        "output_hidden_states",
        "output_attentions",
        "return_dict",
        "id2label",
        "label2id",
        "problem_type",
        "bos_token_id",
        # Layers that this program does not build.
        "num_nextn_predict_layers",
    ]
)
"""Keys of a config.json that do not change the results of a resumed run."""


def model_mismatch(folder: Path, file: str, config: Mapping[str, Any]) -> CheckpointError | None:
    """An error if `file` in the checkpoint `folder` describes another model than `config`, that of the run; else None.

    Both are read by the same transformers, so that older spellings and omitted defaults make no difference.
    """
    try:
        kept = json.loads((folder / file).read_text(encoding="utf-8"))
        then, now = _compared(kept), _compared(config)
    except (OSError, ValueError, KeyError) as unreadable:
        return CheckpointError(
            f"{folder / file} cannot be compared with the model's config.json: {unreadable!r}",
            hint="take another checkpoint",
        )
    differ = [
        f"{key} {then.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]
    if not differ:
        return None
    return CheckpointError(
        f"the model's config.json is not the one that {folder} was trained with: {'; '.join(differ)}",
        hint="set it back, or start a new run from an export: checkpoint.resume never and another output_dir",
    )


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys that change results, with values; a tuple counts as a list."""
    resolved = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in set_values(resolved).items()
        if _WITHOUT_EFFECT.isdisjoint(key.split("."))
    }
