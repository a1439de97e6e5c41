"""DeepSpeed options whose results differ from a reference loop's, and the names in `inexact` of a run file that allow
them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ds_finetune.config.value_types import InexactName
from ds_finetune.plan.batch import divisors
from ds_finetune.plan.deepspeed_config import Tree
from ds_finetune.plan.settings import (
    UNTESTED_STATES,
    Conflict,
    MessageFields,
    Refusal,
    RunSettings,
    refuse_pairs,
    setting,
)

PAGE = "docs/how-to/inexact-options.md"
_WITHOUT_NAME = {
    "bf16.bf16_master_weights_and_grads": "keeps the master weights in 16 bits: small updates are lost",
    "bf16.bf16_optimizer_states": "keeps the moments in bf16",
    "fp16.fp16_master_weights_and_grads": "keeps the master weights in 16 bits: small updates are lost",
    "zero_optimization.zero_quantized_nontrainable_weights": (
        "stores frozen weights in 8 bits; this program would load 16-bit weights into them"
    ),
}
"""Inexact DeepSpeed options that are always refused, because no name in `inexact` allows them; each with its effect."""
_NO_NAME = "and no name of `inexact` allows it"
_COMMUNICATION = "communication_data_type"


@dataclass(frozen=True)
class InexactOption:
    """A DeepSpeed option that is refused unless `inexact` in the run file names it: its key, effects, savings and
    conflicting settings.
    """

    name: InexactName
    key: str
    """Key and value in the DeepSpeed configuration as a user would write them."""
    changes: str
    saves: str
    asked: Callable[[RunSettings], str]
    """Function that returns the key and value with which a run turns the option on; an empty text if it is off."""
    others: tuple[Conflict, ...]


def _switch(key: str) -> Callable[[RunSettings], str]:
    return lambda run: f"zero_optimization.{key} true" if run.zero.get(key) is True else ""


def _other_stage(legal: str, *stages: int) -> Conflict:
    hint = f"set zero_optimization.stage to {legal}"
    return Conflict("zero stage {zero_stage}", hint, lambda run: run.zero_stage not in stages)


_PLAIN_RANKS = (
    Conflict("parallel {mesh}", "set tp, pp, sp and ep to 1", lambda run: run.axes),
    setting("lora", "train all weights"),
    Conflict("train.only or train.freeze", "train all weights", lambda run: run.train.only or run.train.freeze),
)
"""Settings that conflict with every inexact option except `bf16_reduction`."""
_NVME, _ADAM = UNTESTED_STATES
_NO_GPU = "run it on GPUs: DeepSpeed 0.19.8"
_PARTITIONED = (*_PLAIN_RANKS, _other_stage("3, where weights are gathered", 3), _NVME)
_QUANTIZED = (
    *_PARTITIONED,
    Conflict("device {device}", f"{_NO_GPU} has its quantizer only as CUDA kernels", lambda run: run.device != "cuda"),
    Conflict("1 rank", "start several ranks: one sends nothing", lambda run: run.mesh.world_size == 1),
)


def _group(run: RunSettings) -> int:
    """Number of ranks that together hold a secondary copy of the weights (hpZ of ZeRO++)."""
    return int(run.zero.get("zero_hpz_partition_size") or 1)


def _wrong_groups(run: RunSettings) -> MessageFields:
    ranks, group = run.mesh.world_size, _group(run)
    if ranks % group == 0 and group < ranks:
        return None
    legal = list(map(str, divisors(ranks)[1:-1]))
    hint = f"set zero_hpz_partition_size to {' or '.join(legal)}" if legal else "start at least 4 ranks"
    return {"ranks": ranks, "group": group, "legal": hint}


def _offloaded(*stages: int) -> tuple[Conflict, ...]:
    return (
        *_PLAIN_RANKS,
        _other_stage(" or ".join(map(str, stages)), *stages),
        Conflict(
            "offload_optimizer.device {offload_optimizer}",
            "set zero_optimization.offload_optimizer.device: cpu",
            lambda run: run.offload_optimizer != "cpu",
        ),
        _ADAM,
        setting("train.precision fp16", "set train.precision: bf16"),
        Conflict(
            "checkpoint.every {checkpoint.every}, because DeepSpeed keeps a part of the optimizer's state where no "
            "checkpoint finds it",
            "set checkpoint.every: never",
            lambda run: run.checkpoint.saves,
        ),
    )


def _untimed(key: str) -> Conflict:
    def is_untimed(run: RunSettings) -> MessageFields:
        value = run.zero["zenflow"].get(key, "auto")
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return None if is_number else {"value": value}

    return Conflict(f"zenflow.{key} {{value}}", f"set {key} to a number of steps", is_untimed)


def _several_forwards(run: RunSettings) -> MessageFields:
    batch, micro, dp = run.train.global_batch_size, run.micro_batch_size, run.mesh.dp
    values: dict[str, object] = {"micro": micro, "one_forward": batch // dp, "one_batch": micro * dp}
    return values if run.accumulation != 1 else None


_ZENFLOW = (
    *_offloaded(1, 2),
    Conflict(
        "zenflow.select_strategy {strategy}, because DeepSpeed does not know this program's epochs and would choose "
        "columns once",
        "set select_strategy to step, and select_interval and update_interval to numbers of steps",
        lambda run: (given := run.zero["zenflow"].get("select_strategy", "auto")) != "step" and {"strategy": given},
    ),
    _untimed("select_interval"),
    _untimed("update_interval"),
    Conflict(
        "zenflow.overlap_step true, whose steps lag behind in a process that is not tested",
        "leave overlap_step out",
        lambda run: run.zero["zenflow"].get("overlap_step"),
    ),
    Conflict(
        "train.global_batch_size {train.global_batch_size} in {accumulation} forwards of train.micro_batch_size "
        "{micro}, because ZenFlow steps in each forward",
        "set train.micro_batch_size: {one_forward}, or train.global_batch_size: {one_batch}",
        _several_forwards,
    ),
)

OPTIONS = (
    InexactOption(
        "quantized_weights",
        "zero_optimization.zero_quantized_weights: true",
        "weights are gathered in 8 bits, so forward and backward see rounded weights",
        "half of the bytes of gathers in 16 bits",
        _switch("zero_quantized_weights"),
        _QUANTIZED,
    ),
    InexactOption(
        "quantized_gradients",
        "zero_optimization.zero_quantized_gradients: true",
        "gradients are sent in 4 bits",
        "three quarters of the bytes of a reduction in 16 bits",
        _switch("zero_quantized_gradients"),
        (
            *_QUANTIZED,
            Conflict(
                "zero_optimization.reduce_scatter false",
                "leave reduce_scatter out",
                lambda run: run.zero.get("reduce_scatter") is False,
            ),
        ),
    ),
    InexactOption(
        "hierarchical_partition",
        "zero_optimization.zero_hpz_partition_size: 8",
        "backward reads a second copy of the weights, which the ranks of a group share out",
        "the gathers of backward between groups, for the memory of the copy",
        lambda run: f"zero_optimization.zero_hpz_partition_size {_group(run)}" if _group(run) > 1 else "",
        (
            *_PARTITIONED,
            Conflict("{ranks} ranks, which do not form several groups of {group}", "{legal}", _wrong_groups),
        ),
    ),
    InexactOption(
        "bf16_reduction",
        "communication_data_type: bf16",
        "gradients are rounded to bf16 before they are added over the ranks",
        "half of the bytes of a reduction in fp32",
        lambda run: (
            f"{_COMMUNICATION} bf16"
            if run.precision == "fp32" and run.deepspeed_config.get(_COMMUNICATION) == "bf16"
            else ""
        ),
        (
            Conflict("1 rank", "start several ranks: one reduces nothing", lambda run: run.mesh.world_size == 1),
            _other_stage("1, 2 or 3", 1, 2, 3),
        ),
    ),
    InexactOption(
        "zenflow",
        "zero_optimization.zenflow: {select_strategy: step, select_interval: 16, update_interval: 4}",
        "columns with large gradients are updated in each step, all others every few steps by a sum of gradients of "
        "older weights; the gradient is not clipped in between",
        "most of the traffic to the CPU and of its optimizer's time",
        lambda run: "zero_optimization.zenflow" if run.zero.get("zenflow") is not None else "",
        _ZENFLOW,
    ),
    InexactOption(
        "superoffload",
        "zero_optimization.offload_optimizer: {device: cpu, super_offload: true}",
        "the optimizer steps on the CPU while backward runs, before the norm of the gradient is known, and is rolled "
        "back where it was not finite",
        "the time in which the GPU waits for the CPU's optimizer",
        lambda run: (
            "offload_optimizer.super_offload true"
            if (run.zero.get("offload_optimizer") or {}).get("super_offload") is True
            else ""
        ),
        (
            *_offloaded(3),
            Conflict("device {device}", f"{_NO_GPU} refuses every other accelerator", lambda run: run.device != "cuda"),
        ),
    ),
)


def inexact_lines(run: RunSettings) -> list[str]:
    """Plan lines about the inexact options of a run."""
    return [
        f"inexact: {asked}: {option.changes}. It saves {option.saves}; see {PAGE}"
        for option in OPTIONS
        if (asked := option.asked(run))
    ]


def inexact_checks() -> Iterator[Refusal[RunSettings]]:
    """Refusals of all DeepSpeed options whose results differ from a reference loop's."""
    for path, changes in _WITHOUT_NAME.items():
        yield Refusal(_is_on(path), f"{path} true {changes}, {_NO_NAME}", f"leave {path.partition('.')[2]} out")
    overflow = f"fp16 with train.precision {{precision}}: gradients may overflow in fp16, {_NO_NAME}"
    yield Refusal(
        lambda run: run.deepspeed_config.get(_COMMUNICATION) == "fp16" != run.precision,
        f"{_COMMUNICATION} {overflow}",
        f"leave {_COMMUNICATION} out",
    )
    yield Refusal(
        lambda run: run.accumulation_dtype == "fp16" != run.precision,
        f"data_types.grad_accum_dtype {overflow}",
        "leave data_types.grad_accum_dtype out",
    )
    yield Refusal(
        lambda run: run.precision == "fp32" and run.accumulation_dtype in ("bf16", "fp16"),
        "data_types.grad_accum_dtype {accumulation_dtype} with train.precision fp32 rounds the sum of gradients after "
        f"each forward, {_NO_NAME}",
        "leave grad_accum_dtype out",
    )
    for option in OPTIONS:
        yield from _option_checks(option)


def _is_on(path: str) -> Callable[[RunSettings], bool]:
    section, _, key = path.partition(".")
    return lambda run: (run.deepspeed_config.get(section) or {}).get(key) is True


def _option_checks(option: InexactOption) -> Iterator[Refusal[RunSettings]]:

    def values(run: RunSettings) -> MessageFields:
        asked, names = option.asked(run), ", ".join([*run.inexact, option.name])
        return {"asked": asked, "names": names} if asked else None

    yield from refuse_pairs("{asked}", values, option.others, link=" cannot work with ", why="")
    yield Refusal(
        lambda run: option.name not in run.inexact and values(run),
        f"{{asked}} cannot equal a reference loop: {option.changes}",
        f"add `inexact: [{{names}}]` to the run file to allow it ({PAGE}), or leave the option out",
    )
    yield Refusal(
        lambda run: option.name in run.inexact and not values(run) and {"key": option.key, "why": _why(option, run)},
        f"inexact names {option.name}, which has no effect: {{why}}",
        f"take {option.name} out of inexact, or ask for it in `deepspeed`: {{key}}",
    )


def _why(option: InexactOption, run: RunSettings) -> str:
    if option.name == "bf16_reduction" and run.precision != "fp32":
        return f"gradients of a run with train.precision {run.precision} are reduced in 16 bits anyway"
    return f"the DeepSpeed configuration does not have {option.key}"


def without_inexact(tree: Tree) -> Tree:
    """A copy of a DeepSpeed configuration without the inexact options, such as compressed communication."""
    zero = dict(tree.get("zero_optimization") or {})
    for key in ("zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size", "zenflow"):
        zero.pop(key, None)
    if offload := zero.get("offload_optimizer"):
        inexact = ("super_offload", "cpuadam_cores_perc")
        zero["offload_optimizer"] = {key: value for key, value in offload.items() if key not in inexact}
    exact = {key: value for key, value in tree.items() if key != _COMMUNICATION}
    return exact | ({"zero_optimization": zero} if zero else {})
