"""Valid keys of a DeepSpeed JSON at the top level and in sections, and the types of their values."""

import difflib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_finetune.errors import ConfigError

KNOWN_KEYS = frozenset(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "bf16",
        "fp16",
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "data_types",
        "aio",
        "activation_checkpointing",
        "comms_logger",
        "flops_profiler",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "log_level",
        "steps_per_print",
        "disable_allgather",
        "timers",
    ]
)
"""Top-level keys that are passed to DeepSpeed. Other keys are an error, since DeepSpeed 0.19.8 silently ignores them
(runtime/config.py).
"""

_REFUSED = {
    "scheduler": "the learning rate belongs to optim.lr_scheduler",
    "tensor_parallel": "sizes belong to parallel.tp",
    "expert_parallel": "sizes belong to parallel.ep",
    "sequence_parallel_size": "sizes belong to parallel.sp",
    "seq_parallel_communication_data_type": "it belongs to train.reduction_dtype, with sequence parallelism too",
    "pipeline": "sizes belong to parallel.pp",
    "tensorboard": "trackers belong to log.trackers",
    "wandb": "trackers belong to log.trackers",
    "managed_gradient_accumulation": "accumulation is derived from train.global_batch_size",
    # DeepSpeed 0.19.8 itself translates these deprecated keys, but only after this program has read the configuration.
    "cpu_offload": 'write offload_optimizer: {"device": "cpu"}',
    "cpu_offload_param": 'write offload_param: {"device": "cpu"}',
    "cpu_offload_use_pin_memory": "write offload_optimizer.pin_memory and offload_param.pin_memory",
    "stage3_gather_fp16_weights_on_model_save": "write stage3_gather_16bit_weights_on_model_save",
    # runtime/config.py:81-132
    **dict.fromkeys(
        (
            *("elasticity", "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients"),
            *("eigenvalue", "sparse_attention", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
            *("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"),
        ),
        "delete it: DeepSpeed 0.19.8 has removed it",
    ),
}
"""Keys that are refused at the top level and in sections, with the hint of the error."""
_TYPES: Mapping[str, Mapping[str, str]] = json.loads(
    Path(__file__).with_name("deepspeed_keys.json").read_text(encoding="utf-8")
)
"""Keys of each section of a DeepSpeed JSON with the types of their values (int, float, bool or other), from a file that
scripts/deepspeed_keys.py writes. DeepSpeed 0.19.8 itself checks types only when it builds the engine, with a traceback.
"""
_SECTIONS = (
    "optimizer",
    "optimizer.params",
    "aio",
    "data_types",
    "activation_checkpointing",
    "comms_logger",
    "flops_profiler",
)
"""Sections of a DeepSpeed JSON that must be mappings; their keys are checked elsewhere or not at all."""
_DEVICES = ("none", "cpu", "nvme")


def check_keys(tree: Mapping[str, Any], source: str) -> None:
    """ConfigError for a key that is removed, belongs to the run file, or is unknown (with the nearest name)."""
    for key in tree:
        _check_key(f"{source}: ", key, tree[key], KNOWN_KEYS)
    for section, types in _TYPES.items():
        given = _section(tree, section.split("."), source)
        for key, value in given.items():
            _check_key(f"{source}: in {section}: ", key, value, types)
            if wanted := _expected_value(key, value, types[key]):
                raise ConfigError(f"{source}: `{section}.{key}` is {value!r}", hint=f"write {wanted}")
    for section in _SECTIONS:
        _section(tree, section.split("."), source)


def _expected_value(key: str, value: object, kind: str) -> str:
    """Description of the values that DeepSpeed accepts for `key`; empty if it accepts `value`."""
    if value == "auto" or (value is None and key in ("overlap_comm", "device", "nvme_path")):
        return ""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    if kind == "int":
        return "" if number >= 0 and number.is_integer() else "a whole number, e.g. 500000000 (YAML reads 5e8 as text)"
    if kind == "float":
        return "" if 0 <= number < math.inf else "a number from 0 on"
    if key == "device":
        return "" if value in _DEVICES else f"one of {', '.join(_DEVICES)}"
    if key == "nvme_path":
        return "" if isinstance(value, str) else "a folder"
    return "" if kind == "other" or isinstance(value, bool) else "true or false"


def _section(tree: Mapping[str, Any], path: Sequence[str], source: str) -> Mapping[str, Any]:
    for depth, name in enumerate(path, start=1):
        section = tree.get(name)
        if section is not None and not isinstance(section, Mapping):
            wrong = ".".join(path[:depth])
            raise ConfigError(
                f"{source}: `{wrong}` is {section!r}, not a section", hint="write it like ds_configs/zero3_offload.json"
            )
        tree = section or {}
    return tree


def _check_key(where: str, key: str, value: object, known_keys: Collection[str]) -> None:
    if key in _REFUSED:
        raise ConfigError(
            f"{where}`{key}` = {value!r} does not belong in the DeepSpeed configuration", hint=_REFUSED[key]
        )
    if key not in known_keys:
        near = difflib.get_close_matches(key, [*known_keys, *_REFUSED], n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(sorted(known_keys))}"
        raise ConfigError(f"{where}unknown key `{key}` = {value!r}", hint=hint)
