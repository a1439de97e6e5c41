"""The DeepSpeed configuration of a run: taken from the run file or `accelerate launch`, completed with values of the
run file, and refused where they contradict each other.
"""

import copy
import difflib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_finetune.config.run_file import DS_CONFIGS, read_text, set_values, shipped_file, shipped_names
from ds_finetune.config.sections import OptimConfig, TrainConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.batch import rows_of_forward
from ds_finetune.system.world import AccelerateChoices


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer of DeepSpeed 0.19.8 (runtime/config.py:63), of torch.optim or of bitsandbytes."""

    type: str
    """Name of the optimizer's class, or DeepSpeed's name of the optimizer."""
    keys: tuple[str, ...]
    """Keys of `optim` that the optimizer uses."""
    state_bytes: float
    """Maximum bytes of optimizer state per parameter."""
    of: str = "deepspeed"
    """Package of the class: deepspeed, torch or bitsandbytes."""
    needs_unsharded: str = ""
    """Why a step needs unsharded parameters; empty for an elementwise optimizer."""
    fixed: Mapping[str, object] = field(default_factory=dict)


_ADAM = ("lr", "betas", "eps", "weight_decay")
OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw": OptimizerRow("AdamW", _ADAM, 8),
    "adam": OptimizerRow("Adam", _ADAM, 8),
    "lamb": OptimizerRow("Lamb", _ADAM, 8, needs_unsharded="its trust ratio is a ratio of whole parameters' norms"),
    "lion": OptimizerRow("Lion", ("lr", "betas", "weight_decay"), 4),
    "adagrad": OptimizerRow("Adagrad", ("lr", "eps"), 4),
    "muon": OptimizerRow("Muon", _ADAM, 8),
    "sgd": OptimizerRow("SGD", ("lr", "weight_decay"), 0, "torch"),
    "radam": OptimizerRow("RAdam", _ADAM, 8, "torch", fixed={"decoupled_weight_decay": True}),
    "adamax": OptimizerRow("Adamax", ("lr", "betas", "eps"), 8, "torch"),
    "rmsprop": OptimizerRow("RMSprop", ("lr", "eps"), 4, "torch"),
    # Adafactor's state is one fp32 number per row and column of a matrix, which is 4 / rows + 4 / columns bytes per
    # element: 0.25 if both are 32.
    "adafactor": OptimizerRow(
        "Adafactor", ("lr", "weight_decay"), 0.25, "torch", "its state has a number for each row and column of a matrix"
    ),
    # AdamW8bit's state is two bytes per element, and two fp32 scales per block of 256 elements.
    "adamw8bit": OptimizerRow(
        "AdamW8bit", _ADAM, 2 + 8 / 256, "bitsandbytes", "its state has a scale for each 256 numbers of a parameter"
    ),
}
"""Optimizers by lower-case name. One without `weight_decay` among its `keys` would add the decay to the gradient."""


Tree = dict[str, Any]
DEFAULT_CHOICES: Tree = {"zero_optimization": {"stage": 2}}
"""Default configuration: ZeRO-2, which shards optimizer states and gradients but not weights."""

HAS_TORCH_ADAM = ("adam", "adamw", "muon")
"""Optimizers whose Adam kernel is DeepSpeed's FusedAdam unless `torch_adam` is set (0.19.8, runtime/engine.py,
get_optimizer_configuration)."""
_COMMUNICATION, _ACCUMULATION = "communication_data_type", "grad_accum_dtype"
TORCH_ADAM: Tree = {"torch_adam": True, "fused": True}
"""Optimizer parameters that make DeepSpeed use torch's fused AdamW."""


def choose_deepspeed(
    given: str | Mapping[str, Any] | None, accelerate: AccelerateChoices | None
) -> str | Mapping[str, Any] | None:
    """Choose the DeepSpeed configuration: `given` by the run file, else accelerate's file or fields, else None.

    ConfigError where accelerate names a DeepSpeed file whose values differ from the run file's.
    """
    if given is not None or accelerate is None:
        if accelerate is not None and accelerate.config_file:
            _check_same_file(given, accelerate.config_file)
        return given
    if accelerate.config_file:
        return accelerate.config_file
    if accelerate.zero_stage is None:
        return None
    zero: dict[str, Any] = {"stage": accelerate.zero_stage}
    zero |= {"offload_optimizer": {"device": accelerate.offload_optimizer}} if accelerate.offload_optimizer else {}
    zero |= {"offload_param": {"device": accelerate.offload_param}} if accelerate.offload_param else {}
    return {"zero_optimization": zero}


def _check_same_file(given: str | Mapping[str, Any] | None, file: str) -> None:
    """ConfigError where the run file's DeepSpeed configuration differs from accelerate's. A value of "auto" counts as
    absent.
    """
    ours, source = read_choices(given)
    theirs, _ = read_choices(file)
    run_file, accelerate = (
        {key: value for key, value in set_values(each).items() if value != "auto"} for each in (ours, theirs)
    )
    other = [key for key in {**run_file, **accelerate} if run_file.get(key) != accelerate.get(key)]
    if other:
        values = "; ".join(f"{key} {run_file.get(key)!r} and {accelerate.get(key)!r}" for key in other)
        raise ConfigError(
            f"{source} contradicts accelerate's deepspeed_config_file {file}: {values}",
            hint="leave one of the two configurations out, or make them equal",
        )


def read_choices(given: str | Mapping[str, Any] | None) -> tuple[Tree, str]:
    """Read and check the DeepSpeed configuration, from a JSON file, an inline section or the default. Returns it with
    the name of its source.

    ConfigError for keys that DeepSpeed does not know or that are set in another place.
    """
    tree, source = given_choices(given)
    check_keys(tree, source)
    return tree, source


def given_choices(given: str | Mapping[str, Any] | None) -> tuple[Tree, str]:
    """Unchecked DeepSpeed configuration from a run file, and its source; ConfigError for an unreadable file."""
    if given is None:
        return copy.deepcopy(DEFAULT_CHOICES), "the default (ZeRO-2)"
    if not isinstance(given, str):
        return copy.deepcopy(dict(given)), "`deepspeed` in the run file"
    paths = (given, f"{DS_CONFIGS}/{given}.json", f"{DS_CONFIGS}/{given}")
    path = given if Path(given).is_file() else next(filter(None, map(shipped_file, paths)), given)
    names = ", ".join(name.removesuffix(".json") for name in shipped_names(DS_CONFIGS) if "/" not in name)
    text = read_text(path, "deepspeed file", f"name a JSON file, or one of ds_configs/: {names}")
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as broken:
        raise ConfigError(
            f"deepspeed file `{given}` line {broken.lineno} column {broken.colno} is not JSON: {broken.msg}",
            hint="check the commas and quotes there",
        ) from None
    except (ValueError, RecursionError) as unreadable:
        raise ConfigError(f"deepspeed file `{given}` cannot be read: {unreadable}", hint="name a JSON file") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"deepspeed file `{given}` holds a {type(tree).__name__}, not an object",
            hint="write it like ds_configs/zero2.json",
        )
    return tree, given


def offload_device(zero: Mapping[str, Any], what: str) -> str:
    """Device in `offload_optimizer` or `offload_param` of a ZeRO section: `none`, `cpu` or `nvme`."""
    section = zero.get(what) or {}
    return str(section.get("device") or "none")


def stage_of(tree: Mapping[str, Any], source: str) -> int:
    """ZeRO stage in a DeepSpeed configuration, 0 to 3; ConfigError for another value."""
    stage = (tree.get("zero_optimization") or {}).get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"{source}: zero_optimization.stage is {stage!r}", hint="set the stage to 0, 1, 2 or 3")
    return int(stage)


def _optimizer_section(optim: OptimConfig, *, on_cpu: bool, offloaded: bool, torch_adam: bool | None) -> Tree:
    """DeepSpeed's optimizer section; the learning rate is 0 because the engine sets it before each step.

    `torch_adam` is the user's choice of torch's fused kernel over the one that DeepSpeed compiles.

    With a rate of 0 the zero-gradient step that stage 0 takes in its constructor (DeepSpeed 0.19.8,
    fp16/unfused_optimizer.py:425) cannot decay the weights.
    """
    row = OPTIMIZERS[optim.name.lower()]
    params = {key: getattr(optim, key) for key in row.keys}
    params |= {"lr": 0.0, **row.fixed} | ({"betas": list(optim.betas)} if "betas" in row.keys else {})
    if optim.name.lower() in HAS_TORCH_ADAM and not offloaded and (on_cpu or torch_adam):
        # On CPUs, compiling DeepSpeed 0.19.8's FusedAdam takes minutes, and torch's fused kernel takes a fifteenth of
        # the time of torch's for-loop AdamW.
        params |= TORCH_ADAM
    elif torch_adam is False:
        params |= {"torch_adam": False}
    return {"type": row.type, "params": params}


def _check_torch_adam(tree: Tree, optim: OptimConfig, source: str, *, on_cpu: bool, offloaded: bool) -> bool | None:
    """The user's `torch_adam`, or None. ConfigError where it has no effect, and for optimizer parameters that would not
    be passed on to the optimizer.
    """
    params = (tree.get("optimizer") or {}).get("params") or {}
    given = {key: value for key, value in params.items() if value != "auto"}
    name, is_adam = optim.name, optim.name.lower() in HAS_TORCH_ADAM
    for key, value in given.items():
        if key in OPTIMIZERS[name.lower()].keys or (key == "adam_w_mode" and value is True and is_adam):
            continue
        if key != "torch_adam" or not is_adam or not isinstance(value, bool):
            raise ConfigError(
                f"{source}: optimizer.params.{key} {value!r} is not passed on to {name}", hint=f"delete {key}"
            )
        if (value and offloaded) or (not value and on_cpu and not offloaded):
            used = "DeepSpeedCPUAdam" if offloaded else "torch's fused AdamW"
            raise ConfigError(
                f"{source}: optimizer.params.torch_adam {value} has no effect: {used} is used here",
                hint="delete torch_adam",
            )
    return given.get("torch_adam")


def with_reduction_dtype(tree: Mapping[str, Any], train: TrainConfig, *, source: str) -> dict[str, Any]:
    """Add the keys that `train.reduction_dtype` sets to the DeepSpeed configuration `tree`; ConfigError where it has
    other values.
    """
    dtype = train.reduction_dtype
    if dtype in ("auto", train.precision):
        return {**tree}
    data_types = dict(tree.get("data_types") or {})
    keys = {_COMMUNICATION: tree, **({_ACCUMULATION: data_types} if dtype == "fp32" else {})}
    for key, section in keys.items():
        if (given := section.get(key)) not in (None, "auto", dtype):
            raise ConfigError(
                f"{source}: {key} {given!r} contradicts train.reduction_dtype {dtype}, which sets {dtype!r}",
                hint=f"leave {key} or train.reduction_dtype out",
            )
    merged = {**tree, _COMMUNICATION: dtype}
    return merged | {"data_types": data_types | {_ACCUMULATION: dtype}} if dtype == "fp32" else merged


def finish(
    choices: tuple[Tree, str], train: TrainConfig, optim: OptimConfig, *, accumulation: int, on_cpu: bool
) -> Tree:
    """Complete `choices`, a DeepSpeed configuration and its source, with values of the run file for
    `deepspeed.initialize`. If `choices` contradicts the run file, a ConfigError names both values.
    """
    tree, source = choices
    offloaded = offload_device(tree.get("zero_optimization") or {}, "offload_optimizer") != "none"
    if optim.name.lower() not in OPTIMIZERS:
        names = ", ".join(sorted(row.type for row in OPTIMIZERS.values()))
        raise ConfigError(f"optim.name `{optim.name}` is not known", hint=f"use one of {names}")
    derived: Tree = {
        "train_batch_size": train.global_batch_size,
        "train_micro_batch_size_per_gpu": rows_of_forward(train),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": train.max_grad_norm,
        "bf16": {"enabled": train.precision == "bf16"},
        "fp16": {"enabled": train.precision == "fp16"},
    }
    pairs, hint = _values_given_twice(tree, train, optim, derived), 'write "auto" for {}, or make them equal'
    _check_equal(pairs, hint, before=f"{source}: ")
    torch_adam = _check_torch_adam(tree, optim, source, on_cpu=on_cpu, offloaded=offloaded)
    derived["optimizer"] = _optimizer_section(optim, on_cpu=on_cpu, offloaded=offloaded, torch_adam=torch_adam)
    finished = _without_auto(tree)
    for key in ("bf16", "fp16"):
        if derived[key]["enabled"]:
            derived[key] = (finished.get(key) or {}) | derived[key]
    zero = finished.get("zero_optimization") or {}
    if zero.get("stage"):
        # overlap_comm gets DeepSpeed's own default (0.19.8, zero/config.py) here, so that reports of the run show the
        # value.
        zero.setdefault("overlap_comm", zero["stage"] == 3)
    finished |= derived | {"zero_optimization": zero}
    # DeepSpeed 0.19.8's throughput timer is off, because it synchronises the device twice per micro-batch
    # (utils/timer.py:238, 256).
    finished.setdefault("timers", {"throughput": {"enabled": False}})
    if OPTIMIZERS[optim.name.lower()].of != "deepspeed":
        finished["zero_allow_untested_optimizer"] = True
    return finished


def _without_auto(tree: Mapping[str, Any]) -> Tree:
    return {k: _without_auto(v) if isinstance(v, dict) else v for k, v in tree.items() if v != "auto"}


def _check_equal(pairs: Iterable[tuple[str, object, str, object]], hint: str, *, before: str, after: str = "") -> None:
    """Raise a ConfigError if a value of DeepSpeed's or accelerate's configuration contradicts the run file. None and
    "auto" count as absent. An item of `pairs` is (name there, value there, run-file key, run-file value). The message
    begins with `before` and ends with `after`.
    """
    for name, value, key, own in pairs:
        if value not in (None, "auto") and value != own and not (isinstance(value, list) and tuple(value) == own):
            raise ConfigError(f"{before}{name} {value!r} contradicts {key} {own!r}{after}", hint=hint.format(name))


DERIVED_KEYS = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "global_batch_size / (micro_batch_size x dp) =",
    "gradient_clipping": "train.max_grad_norm",
}
"""Keys of a DeepSpeed configuration whose values follow from the run file, each with its source as messages name it."""


def _values_given_twice(
    tree: Tree, train: TrainConfig, optim: OptimConfig, derived: Tree
) -> Iterator[tuple[str, object, str, object]]:
    for key, own in DERIVED_KEYS.items():
        yield key, tree.get(key), own, derived[key]
    for key in ("bf16", "fp16"):
        enabled = (tree.get(key) or {}).get("enabled")
        yield (f"{key}.enabled", enabled, f"train.precision {train.precision}, that is", train.precision == key)
    optimizer = tree.get("optimizer") or {}
    kind = optimizer.get("type")
    yield ("optimizer.type", kind if str(kind).lower() != optim.name.lower() else None, "optim.name", optim.name)
    for key in OPTIMIZERS[optim.name.lower()].keys:
        yield (f"optimizer.params.{key}", (optimizer.get("params") or {}).get(key), f"optim.{key}", getattr(optim, key))


def check_accelerate_agrees(accelerate: AccelerateChoices, train: TrainConfig, finished: Mapping[str, Any]) -> None:
    """ConfigError where `accelerate launch` and the run file give different values, naming both."""
    zero, accumulation = finished["zero_optimization"], "gradient_accumulation_steps"
    optimizer, weights = (offload_device(zero, what) for what in ("offload_optimizer", "offload_param"))
    pairs = (
        ("zero_stage", accelerate.zero_stage, "zero_optimization.stage", zero.get("stage", 0)),
        ("offload_optimizer_device", accelerate.offload_optimizer, "offload_optimizer.device", optimizer),
        ("offload_param_device", accelerate.offload_param, "offload_param.device", weights),
        (accumulation, accelerate.gradient_accumulation_steps, DERIVED_KEYS[accumulation], finished[accumulation]),
        ("gradient_clipping", accelerate.gradient_clipping, "train.max_grad_norm", train.max_grad_norm),
        ("mixed_precision", accelerate.mixed_precision, "train.precision", train.precision),
    )
    hint = "leave {} out of accelerate's file, or make them equal"
    _check_equal(pairs, hint, before="accelerate's ", after=" of the run file")


_PINNED = "DeepSpeed 0.19.8: the CPU accelerator has no pinned memory; asking for it compiles an op that only copies"
_OVERLAP = (
    "DeepSpeed 0.19.8, gloo: streams are no-ops there, ZeRO-3 reads gradients before they are reduced; four of six "
    "fp32 starts gave wrong losses without an error (same family: DeepSpeed issue 7718)"
)


def turn_off_wrong_options(zero: Tree, *, device: str) -> list[str]:
    """Turn off, in place, options of a ZeRO section that compute wrong numbers on the accelerator. Returns a note for
    each option.
    """
    if device != "cpu":
        return []
    stage, lines = zero.get("stage", 0), []
    if stage and zero.get("overlap_comm", stage == 3) is not False:
        zero["overlap_comm"] = False
        lines.append(f"rewritten: overlap_comm on the CPU accelerator is off. {_OVERLAP}")
    for what in ("offload_optimizer", "offload_param"):
        if offload_device(zero, what) != "none" and zero[what].get("pin_memory", True):
            zero[what]["pin_memory"] = False
            lines.append(f"rewritten: {what}.pin_memory on the CPU accelerator is off. {_PINNED}")
    return lines


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
"""Keys of a DeepSpeed JSON that are refused at the top level and in sections, each with the hint of the error."""
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
    """ConfigError for a key of a DeepSpeed JSON that is refused, belongs to the run file, or is unknown (with the
    nearest name).
    """
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
        value = tree.get(name)
        if value is not None and not isinstance(value, Mapping):
            key = ".".join(path[:depth])
            raise ConfigError(
                f"{source}: `{key}` is {value!r}, not a section", hint="write it like ds_configs/zero3_offload.json"
            )
        tree = value or {}
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
