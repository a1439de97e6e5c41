"""Checks that a resumed run equals the run of its checkpoint: run file, data, versions, and the model's config.json."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from ds_finetune.checkpoint.run_state import RunState, versions
from ds_finetune.config.objectives import OBJECTIVES, ObjectiveConfig
from ds_finetune.config.run_file import set_values
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import RouterConfig
from ds_finetune.config.value_types import OnResume
from ds_finetune.errors import CheckpointError
from ds_finetune.foreign.auto_configs import CONFIG_MAPPING
from ds_finetune.plan.deepspeed_config import DERIVED_KEYS

_DERIVED = (*DERIVED_KEYS, "optimizer.", "bf16.enabled", "fp16.enabled")
"""Keys of the DeepSpeed configuration that are not compared, because their values follow from the run file."""


@dataclass(frozen=True)
class RunIdentity:
    """Values of a run to compare with its checkpoint. `config` is the run file; other fields are as in `RunState`."""

    config: Mapping[str, Any]
    data: str
    base: str = ""
    teacher: str = ""
    held_out: str = ""
    deepspeed: Mapping[str, Any] = field(default_factory=dict)


def changes_since_checkpoint(state: RunState, now: RunIdentity) -> list[str]:
    """Lines on allowed differences between a run and its checkpoint. CheckpointError for other differences."""
    differ = _differences(_keys(state.config), _keys(now.config))
    broken = [text for key, text in differ.items() if on_resume(key) is OnResume.REFUSED]
    broken += [f"training rows {state.data} -> {now.data}"] if state.data != now.data else []
    for what, old, new in (("base model", state.base, now.base), ("teacher", state.teacher, now.teacher)):
        broken += [f"weights of the {what} {old or 'none'} -> {new or 'none'}"] if old != new else []
    if broken:
        raise CheckpointError(
            f"the checkpoint of step {state.step} was written with other values: {'; '.join(broken)}",
            hint="restore the old values, or start a new run: set checkpoint.resume: never and another output_dir",
        )
    lines = [text for key, text in differ.items() if on_resume(key) is not OnResume.FREE]
    installed = versions()
    if state.deepspeed:
        # A DeepSpeed file may have changed although the run file names the same file.
        choices = _differences(set_values(state.deepspeed), set_values(now.deepspeed))
        lines += [f"DeepSpeed's {text}" for key, text in choices.items() if not key.startswith(_DERIVED)]
    lines += _other_evaluation(state, now)
    lines += [
        f"{key} {old} -> {installed[key]}" for key, old in state.versions.items() if installed.get(key, old) != old
    ]
    return [f"changed since the checkpoint: {text}" for text in lines]


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: f"{key} {then.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    }


def on_resume(key: str) -> OnResume:
    """Whether resuming refuses, prints or ignores a changed value of `key` in the run file. Default: print."""
    sections: list[type[BaseModel]] = [RunConfig]
    for name in key.split("."):
        infos = [info for part in sections for own, info in part.model_fields.items() if name == (info.alias or own)]
        marks = [mark for info in infos for mark in info.metadata if isinstance(mark, OnResume)]
        if marks:
            return marks[0]
        kinds = [kind for info in infos for kind in (info.annotation, *get_args(info.annotation))]
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if ObjectiveConfig in sections:
            sections = [row.section for row in OBJECTIVES.values()]
    return OnResume.PRINTED


def _keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a run file by dotted key. Missing keys, as in files of older versions, get their defaults."""
    defaults = RunConfig.model_validate({"model": "", "data": {"train": ""}, "output_dir": ""}).model_dump(
        mode="json", by_alias=True
    )
    routers = {"router": RouterConfig().model_dump()}
    values = set_values(defaults) | set_values(routers) | set_values(config)
    # Adam and AdamW are the same optimizer in this program (decoupled weight decay), so they count as equal.
    name = str(values["optim.name"]).lower()
    return values | {"optim.name": "adamw" if name == "adam" else name}


def _other_evaluation(state: RunState, now: RunIdentity) -> list[str]:
    """A line if the evaluation rows have changed; CheckpointError if the run compares losses with the best one."""
    if not (state.held_out and now.held_out) or state.held_out == now.held_out:
        return []
    best = float(state.observers.get("best", {}).get("best_loss", math.inf))
    values = _keys(now.config)
    comparing = [key for key in ("eval.keep_best", "eval.patience", "checkpoint.keep_best") if values[key]]
    text = f"evaluation rows {state.held_out} -> {now.held_out}"
    if math.isfinite(best) and comparing:
        raise CheckpointError(
            f"the best eval/loss {best:.4f} in the checkpoint of step {state.step} was measured on other rows: {text}",
            hint=f"use the same data.eval, or turn off the comparison of losses: {', '.join(comparing)}",
        )
    return [text]


_WITHOUT_EFFECT = frozenset(
    [
        "transformers_version",
        "_name_or_path",
        "architectures",
        "auto_map",
        # The run file sets dtype and attention (train.precision, model.attention); the key-value cache is not used.
        "dtype",
        "torch_dtype",
        "_attn_implementation",
        "use_cache",
        # Keys on how weights are stored or initialised have no effect: weights come from the checkpoint, and a digest
        # identifies the base weights of adapters.
        "quantization_config",
        "initializer_range",
        # Keys on outputs of a forward pass, and on tasks other than language modelling, have no effect.
        "output_hidden_states",
        "output_attentions",
        "return_dict",
        "id2label",
        "label2id",
        "problem_type",
        "bos_token_id",
        # Whether prediction layers are trained is decided by mtp.train of the run file.
        "num_nextn_predict_layers",
    ]
)
"""Keys of a config.json that do not change the results of a resumed run."""


def model_mismatch(folder: Path, file: str, config: Mapping[str, Any]) -> CheckpointError | None:
    """Make the error if the config.json in a checkpoint describes another model than the run's `config`; else None. The
    same version of transformers parses both, so that older spellings and omitted defaults make no difference.
    """
    try:
        saved = json.loads((folder / file).read_text(encoding="utf-8"))
        differ = _differences(_compared(saved), _compared(config))
    except (OSError, ValueError, KeyError) as unreadable:
        return CheckpointError(
            f"{folder / file} cannot be compared with the model's config.json: {unreadable!r}",
            hint="use another checkpoint",
        )
    if not differ:
        return None
    return CheckpointError(
        f"the model's config.json differs from the one in {folder}: {'; '.join(differ.values())}",
        hint="restore the config.json, or start a new run: set checkpoint.resume: never and another output_dir",
    )


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    resolved = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in set_values(resolved).items()
        if _WITHOUT_EFFECT.isdisjoint(key.split("."))
    }
