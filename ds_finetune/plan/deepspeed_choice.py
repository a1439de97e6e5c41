"""Chooses the DeepSpeed configuration of the run file or of `accelerate launch`; where both exist they must agree."""

from collections.abc import Mapping
from typing import Any

from ds_finetune.config.dotted_keys import set_values
from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.deepspeed_config import read_choices
from ds_finetune.plan.options import offload_device
from ds_finetune.system.world import AccelerateChoices


def choose_deepspeed(config: RunConfig, accelerate: AccelerateChoices | None) -> str | Mapping[str, Any] | None:
    """The run file's `deepspeed`, else accelerate's DeepSpeed file or fields, else None for the default.

    ConfigError where accelerate names a DeepSpeed file with other values than the run file's.
    """
    if config.deepspeed is not None or accelerate is None:
        if accelerate is not None and accelerate.config_file:
            _check_same_file(config.deepspeed, accelerate.config_file)
        return config.deepspeed
    if accelerate.config_file:
        return accelerate.config_file
    if accelerate.zero_stage is None:
        return None
    zero: dict[str, Any] = {"stage": accelerate.zero_stage}
    zero |= {"offload_optimizer": {"device": accelerate.offload_optimizer}} if accelerate.offload_optimizer else {}
    zero |= {"offload_param": {"device": accelerate.offload_param}} if accelerate.offload_param else {}
    return {"zero_optimization": zero}


def _check_same_file(given: str | Mapping[str, Any] | None, file: str) -> None:
    """ConfigError where the two configurations differ; a key that is "auto" counts as absent."""
    ours, source = read_choices(given)
    theirs, _ = read_choices(file)
    left, right = (
        {key: value for key, value in set_values(each).items() if value != "auto"} for each in (ours, theirs)
    )
    other = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    if other:
        values = "; ".join(f"{key} {left.get(key)!r} and {right.get(key)!r}" for key in other)
        raise ConfigError(
            f"{source} contradicts accelerate's deepspeed_config_file {file}: {values}",
            hint="leave one of them out, or make them equal",
        )


def check_accelerate_agrees(accelerate: AccelerateChoices, config: RunConfig, finished: Mapping[str, Any]) -> None:
    """ConfigError where `accelerate launch` and the run file give different values, naming both."""
    zero = finished["zero_optimization"]
    pairs = (
        ("zero_stage", accelerate.zero_stage, "zero_optimization.stage", zero.get("stage", 0)),
        (
            "offload_optimizer_device",
            accelerate.offload_optimizer,
            "offload_optimizer.device",
            offload_device(zero, "offload_optimizer"),
        ),
        (
            "offload_param_device",
            accelerate.offload_param,
            "offload_param.device",
            offload_device(zero, "offload_param"),
        ),
        (
            "gradient_accumulation_steps",
            accelerate.gradient_accumulation_steps,
            "global_batch_size / (micro_batch_size x dp) =",
            finished["gradient_accumulation_steps"],
        ),
        ("gradient_clipping", accelerate.gradient_clipping, "train.max_grad_norm", config.train.max_grad_norm),
        ("mixed_precision", accelerate.mixed_precision, "train.precision", config.train.precision),
    )
    for name, theirs, own, ours in pairs:
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"accelerate's {name} {theirs!r} contradicts {own} {ours!r} of the run file",
                hint=f"leave {name} out of accelerate's file, or make them equal",
            )
