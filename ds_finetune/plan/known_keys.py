"""The keys that a DeepSpeed JSON may have, at the top and in its sections, and the types of their values."""

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
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
        "seq_parallel_communication_data_type",
        "disable_allgather",
        "timers",
    ]
)
"""Top-level keys that are passed on. DeepSpeed 0.19.8 silently ignores unknown ones (runtime/config.py), so unknown
keys are an error here.
"""

OWNED_ELSEWHERE = {
    "scheduler": "the learning rate belongs to optim.lr_scheduler",
    "tensor_parallel": "sizes belong to parallel.tp",
    "expert_parallel": "sizes belong to parallel.ep",
    "sequence_parallel_size": "sizes belong to parallel.sp",
    "pipeline": "sizes belong to parallel.pp",
    "tensorboard": "trackers belong to log.trackers",
    "wandb": "trackers belong to log.trackers",
    "managed_gradient_accumulation": "accumulation is derived from train.global_batch_size",
}
REMOVED = frozenset(
    [
        "elasticity",
        "nebula",
        "compression_training",
        "amp",
        "quantize_training",
        "sparse_gradients",
        "eigenvalue",
        "sparse_attention",
        "graph_harvesting",
        "curriculum_learning",
        "progressive_layer_drop",
        "mics_shard_size",
        "mics_hierarchical_params_gather",
        "zeropp_loco_param",
    ]
)
"""Keys DeepSpeed 0.19.8 removed and rejects (runtime/config.py:81-132), the last three of `zero_optimization`."""
RENAMED = {
    "cpu_offload": 'offload_optimizer: {"device": "cpu"}',
    "cpu_offload_param": 'offload_param: {"device": "cpu"}',
    "cpu_offload_use_pin_memory": "offload_optimizer.pin_memory and offload_param.pin_memory",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
"""Deprecated keys of `zero_optimization`, with what to write instead.

DeepSpeed 0.19.8 would replace them only after this program has read the configuration.
"""
_STAGE3_ALIASES = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
_ZERO_KEYS = (
    "stage",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "compute_grad_norm",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "offload_param",
    "offload_optimizer",
    "zenflow",
    "sub_group_size",
    *_STAGE3_ALIASES,
    *(f"stage3_{name}" for name in _STAGE3_ALIASES),
    "ignore_unused_parameters",
    "legacy_stage1",
    "round_robin_gradients",
    "parameter_alignment",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "memory_efficient_linear",
    "pipeline_loading_checkpoint",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "save_muon_momentum_buffer_in_memory",
    "leaf_module",
)
_OFFLOAD_KEYS = ("device", "nvme_path", "buffer_count", "buffer_size", "pin_memory")
KNOWN_IN_SECTIONS: Mapping[str, Collection[str]] = {
    "zero_optimization": _ZERO_KEYS,
    "zero_optimization.offload_param": (*_OFFLOAD_KEYS, "max_in_cpu"),
    "zero_optimization.offload_optimizer": (
        *("device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio"),
        *("super_offload", "cpuadam_cores_perc"),
    ),
    "zero_optimization.zenflow": (
        *("topk_ratio", "select_strategy", "select_interval", "update_interval", "overlap_step", "offload"),
        *("auto_ratio", "full_warm_up_rounds", "pt_reserved_cores_perc", "steps_per_epoch"),
    ),
    "zero_optimization.leaf_module": ("classes", "names", "name_suffixes"),
    "bf16": (
        "enabled",
        "immediate_grad_update",
        "check_grad_overflow",
        "bf16_master_weights_and_grads",
        "bf16_optimizer_states",
    ),
    "fp16": (
        *("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
        *("consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"),
    ),
}
"""Keys of sections that DeepSpeed 0.19.8 checks only when it builds the engine, by a traceback (zero/config.py,
zero/offload_config.py, precision_config.py)."""
_SECTIONS = (
    "optimizer",
    "optimizer.params",
    "aio",
    "data_types",
    "activation_checkpointing",
    "comms_logger",
    "flops_profiler",
)
"""Sections whose keys are checked elsewhere, or nowhere."""
COUNTS = frozenset(
    [
        *("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "zero_hpz_partition_size"),
        *(prefix + name for prefix in ("", "stage3_") for name in _STAGE3_ALIASES[:5]),
        *("module_granularity_threshold", "stage3_module_granularity_threshold"),
        *("buffer_count", "buffer_size", "max_in_cpu"),
        *("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
        *("select_interval", "update_interval", "full_warm_up_rounds", "steps_per_epoch"),
    ]
)
"""Keys of `KNOWN_IN_SECTIONS` that DeepSpeed reads as whole numbers."""
NUMBERS = frozenset(["loss_scale", "ratio", "cpuadam_cores_perc", "topk_ratio", "auto_ratio", "pt_reserved_cores_perc"])
OTHER_TYPES = frozenset(
    [
        *("stage", "offload_param", "offload_optimizer", "zenflow", "leaf_module"),
        *("device", "nvme_path", "classes", "names", "name_suffixes", "select_strategy"),
    ]
)
"""Keys that are neither numbers nor true or false; all other keys are true or false."""
_DEVICES = ("none", "cpu", "nvme")


def check_keys(tree: Mapping[str, Any], source: str) -> None:
    """ConfigError for a key that is removed, owned by the run file, or unknown (with the nearest name)."""
    for key in tree:
        if key in OWNED_ELSEWHERE:
            raise ConfigError(
                f"{source}: `{key}` = {tree[key]!r} does not belong into the DeepSpeed configuration",
                hint=OWNED_ELSEWHERE[key],
            )
        _check_key(f"{source}: ", key, tree[key], KNOWN_KEYS)
    for section, known in KNOWN_IN_SECTIONS.items():
        given = _section(tree, section.split("."), source)
        for key, value in given.items():
            if key in RENAMED:
                raise ConfigError(
                    f"{source}: `{section}.{key}` = {value!r} is deprecated in DeepSpeed 0.19.8",
                    hint=f"write {RENAMED[key]}",
                )
            _check_key(f"{source}: in {section}: ", key, value, known)
            if wanted := _expected_value(key, value):
                raise ConfigError(f"{source}: `{section}.{key}` is {value!r}", hint=f"write {wanted}")
    for section in _SECTIONS:
        _section(tree, section.split("."), source)


def _expected_value(key: str, value: object) -> str:
    """A description of the values that DeepSpeed takes for `key`; empty where it takes `value`."""
    if value == "auto" or (value is None and key in ("overlap_comm", "device", "nvme_path")):
        return ""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    if key in COUNTS:
        return "" if number >= 0 and number.is_integer() else "a whole number, e.g. 500000000 (YAML reads 5e8 as text)"
    if key in NUMBERS:
        return "" if 0 <= number < math.inf else "a number from 0 on"
    if key == "device":
        return "" if value in _DEVICES else f"one of {', '.join(_DEVICES)}"
    if key == "nvme_path":
        return "" if isinstance(value, str) else "a folder"
    return "" if key in OTHER_TYPES or isinstance(value, bool) else "true or false"


def _section(tree: Mapping[str, Any], path: Sequence[str], source: str) -> Mapping[str, Any]:
    """The section at `path`, empty where it is not given; ConfigError where another value than a section is
    there.
    """
    for depth, name in enumerate(path, start=1):
        found = tree.get(name)
        if found is not None and not isinstance(found, Mapping):
            wrong = ".".join(path[:depth])
            raise ConfigError(
                f"{source}: `{wrong}` is {found!r}, not a section", hint="see ds_configs/zero3_offload.json"
            )
        tree = found or {}
    return tree


def _check_key(where: str, key: str, value: object, known: Collection[str]) -> None:
    if key in REMOVED:
        raise ConfigError(f"{where}`{key}` = {value!r} was removed in DeepSpeed 0.19.8", hint=f"delete `{key}`")
    if key not in known:
        near = difflib.get_close_matches(key, [*known, *OWNED_ELSEWHERE], n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(sorted(known))}"
        raise ConfigError(f"{where}unknown key `{key}` = {value!r}", hint=hint)
