"""Options of DeepSpeed that cannot equal a plain loop: which key `inexact` of a run file allows which of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.value_types import InexactName
from ds_finetune.errors import ConfigError
from ds_finetune.families.table import family_of
from ds_finetune.plan.batch import rows_of_forward
from ds_finetune.plan.combinations import AXES
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.options import Tree, offload_device

PAGE = "docs/how-to/inexact-options.md"
_WITHOUT_NAME = {
    "bf16.bf16_master_weights_and_grads": "keeps the master weights in 16 bits: small updates are lost",
    "bf16.bf16_optimizer_states": "keeps the moments in bf16",
    "fp16.fp16_master_weights_and_grads": "keeps the master weights in 16 bits: small updates are lost",
    "zero_optimization.zero_quantized_nontrainable_weights": (
        "stores frozen weights in 8 bits; this program would load 16-bit weights into them"
    ),
}
"""Switches that are inexact and that no name allows, with what they change."""
_COMMUNICATION = "communication_data_type"


@dataclass(frozen=True)
class InexactRun:
    """What the rules of an option depend on: its run file, DeepSpeed configuration, ranks, device and accumulation."""

    config: RunConfig
    tree: Tree
    mesh: Mesh
    device: str
    accumulation: int
    """Forwards of an optimizer step on a rank."""

    @property
    def zero(self) -> Mapping[str, Any]:
        """The section `zero_optimization`."""
        return self.tree["zero_optimization"]

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self.zero.get("stage", 0))

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        mesh = self.mesh
        return mesh.dp * mesh.sp * mesh.tp * mesh.pp

    @property
    def offload(self) -> str:
        """Where the optimizer's states are: `none`, `cpu` or `nvme`."""
        return offload_device(self.zero, "offload_optimizer")


Unmet = tuple[str, str]
"""What keeps an option from working in a run, with both values, and what to do."""


@dataclass(frozen=True)
class InexactOption:
    """A name of `inexact`: the key that asks for it, what it changes, what it saves, and what it needs of a run."""

    name: InexactName
    key: str
    """A key of the DeepSpeed configuration with a value, as a user would write it."""
    changes: str
    saves: str
    asked: Callable[[InexactRun], str]
    """The key and value that ask for it in a run; empty where none does."""
    unmet: Callable[[InexactRun], Iterator[Unmet]]


def _switch(key: str) -> Callable[[InexactRun], str]:
    return lambda run: f"zero_optimization.{key} true" if run.zero.get(key) is True else ""


def _plain_ranks(run: InexactRun) -> Iterator[Unmet]:
    """What all options but one need: data parallel ranks alone, and no LoRA."""
    if any(getattr(run.mesh, axis) > 1 for axis in AXES):
        yield f"parallel {run.mesh}", "set tp, pp, sp and ep to 1"
    if run.config.lora is not None:
        yield "lora", "train all weights"


def _partitioned(run: InexactRun) -> Iterator[Unmet]:
    yield from _plain_ranks(run)
    if run.stage != 3:
        yield f"zero stage {run.stage}", "set zero_optimization.stage to 3, where weights are gathered"
    if "nvme" in (run.offload, offload_device(run.zero, "offload_param")):
        yield "offload to nvme", "offload to cpu"


def _quantized(run: InexactRun) -> Iterator[Unmet]:
    yield from _partitioned(run)
    if run.device != "cuda":
        yield f"device {run.device}", "run it on GPUs: DeepSpeed 0.19.8 has its quantizer as CUDA kernels alone"
    if run.ranks == 1:
        yield "1 rank", "start several ranks: one sends nothing"


def _quantized_gradients(run: InexactRun) -> Iterator[Unmet]:
    yield from _quantized(run)
    if run.zero.get("reduce_scatter") is False:
        yield "zero_optimization.reduce_scatter false", "leave it out"


def _hierarchical(run: InexactRun) -> Iterator[Unmet]:
    yield from _partitioned(run)
    size = int(run.zero["zero_hpz_partition_size"])
    if run.ranks % size or size >= run.ranks:
        legal = [n for n in range(2, run.ranks) if run.ranks % n == 0]
        hint = f"set it to {' or '.join(map(str, legal))}" if legal else "start at least 4 ranks"
        yield f"{run.ranks} ranks, which do not form several groups of {size}", hint


def _offloaded(run: InexactRun, stages: Sequence[int]) -> Iterator[Unmet]:
    yield from _plain_ranks(run)
    if run.stage not in stages:
        yield f"zero stage {run.stage}", f"set zero_optimization.stage to {' or '.join(map(str, stages))}"
    if run.offload != "cpu":
        yield f"offload_optimizer.device {run.offload}", "set zero_optimization.offload_optimizer.device to cpu"
    if run.config.optim.name.lower() not in ("adam", "adamw"):
        yield f"optim.name {run.config.optim.name}", "use AdamW"
    if run.config.train.precision == "fp16":
        yield "train.precision fp16", "set train.precision to bf16"
    if run.config.checkpoint.every != "never":
        yield (
            f"checkpoint.every {run.config.checkpoint.every}, because DeepSpeed keeps a part of the optimizer's state "
            "where no checkpoint finds it",
            "set checkpoint.every to never",
        )


def _zenflow(run: InexactRun) -> Iterator[Unmet]:
    yield from _offloaded(run, (1, 2))
    section = run.zero["zenflow"]
    if not isinstance(section, Mapping):
        yield f"the value {section!r}", "write a section, e.g. {select_strategy: step, select_interval: 16}"
        return
    if section.get("select_strategy") != "step":
        yield (
            f"zenflow.select_strategy {section.get('select_strategy', 'auto')}, because DeepSpeed does not know this "
            "program's epochs and would choose columns once",
            "set select_strategy to step, and select_interval and update_interval to numbers of steps",
        )
    for key in ("select_interval", "update_interval"):
        value = section.get(key, "auto")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"zenflow.{key} {value}", "set it to a number of steps"
    if section.get("overlap_step"):
        yield (
            "zenflow.overlap_step true, whose steps lag behind in a process that is not tested",
            "leave overlap_step out",
        )
    if run.accumulation != 1:
        batch, micro, dp = run.config.train.global_batch_size, rows_of_forward(run.config.train), run.mesh.dp
        yield (
            f"train.global_batch_size {batch} in {run.accumulation} forwards of train.micro_batch_size {micro}, "
            "because ZenFlow steps in each forward",
            f"set train.micro_batch_size to {batch // dp}, or train.global_batch_size to {micro * dp}",
        )


def _superoffload(run: InexactRun) -> Iterator[Unmet]:
    yield from _offloaded(run, (3,))
    if run.device != "cuda":
        yield f"device {run.device}", "run it on GPUs: DeepSpeed 0.19.8 refuses every other accelerator"


def _low_reduction(run: InexactRun) -> str:
    """The key that lowers the dtype of a gradient's reduction below that of the gradient."""
    is_lower = run.config.train.precision == "fp32" and run.tree.get(_COMMUNICATION) == "bf16"
    return f"{_COMMUNICATION} bf16" if is_lower else ""


def _reduction(run: InexactRun) -> Iterator[Unmet]:
    if run.ranks == 1:
        yield "1 rank", "start several ranks: one reduces nothing"
    if run.stage == 0:
        yield "zero stage 0", "set zero_optimization.stage to 1, 2 or 3"


OPTIONS = (
    InexactOption(
        "quantized_weights",
        "zero_optimization.zero_quantized_weights: true",
        "weights are gathered in 8 bits, so forward and backward see rounded weights",
        "half of the bytes of gathers in 16 bits",
        _switch("zero_quantized_weights"),
        _quantized,
    ),
    InexactOption(
        "quantized_gradients",
        "zero_optimization.zero_quantized_gradients: true",
        "gradients are sent in 4 bits",
        "three quarters of the bytes of a reduction in 16 bits",
        _switch("zero_quantized_gradients"),
        _quantized_gradients,
    ),
    InexactOption(
        "hierarchical_partition",
        "zero_optimization.zero_hpz_partition_size: 8",
        "backward reads a second copy of the weights, which the ranks of a group share out",
        "the gathers of backward between groups, for the memory of the copy",
        lambda run: (
            f"zero_optimization.zero_hpz_partition_size {size}"
            if (size := int(run.zero.get("zero_hpz_partition_size") or 1)) > 1
            else ""
        ),
        _hierarchical,
    ),
    InexactOption(
        "bf16_reduction",
        "communication_data_type: bf16",
        "gradients are rounded to bf16 before they are added over the ranks",
        "half of the bytes of a reduction in fp32",
        _low_reduction,
        _reduction,
    ),
    InexactOption(
        "zenflow",
        "zero_optimization.zenflow: {select_strategy: step, select_interval: 16, update_interval: 4}",
        "columns with large gradients are updated in each step, all others every few steps by a sum of gradients of "
        "older weights; the gradient is not clipped in between",
        "most of the traffic to the CPU and of its optimizer's time",
        lambda run: "zero_optimization.zenflow" if run.zero.get("zenflow") is not None else "",
        _zenflow,
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
        _superoffload,
    ),
)


def check_inexact(run: InexactRun) -> list[str]:
    """A line for each inexact option of `run`; ConfigError for one that `inexact` does not name, that cannot work in
    the run, or that is named without being asked for.
    """
    _check_without_name(run)
    lines = []
    for option in OPTIONS:
        asked, is_named = option.asked(run), option.name in run.config.inexact
        if asked and not is_named:
            raise ConfigError(
                f"{asked} cannot equal a plain loop: {option.changes}",
                hint=f"add `inexact: [{', '.join([*run.config.inexact, option.name])}]` to the run file to allow it "
                f"({PAGE}), or leave the option out",
            )
        if is_named and not asked:
            raise ConfigError(
                f"inexact names {option.name}, which has no effect: {_why_unasked(option, run)}",
                hint=f"take {option.name} out of inexact, or ask for it in `deepspeed`: {option.key}",
            )
        if asked:
            for what, hint in option.unmet(run):
                raise ConfigError(f"{asked} cannot work with {what}", hint=hint)
            lines.append(f"inexact: {asked}: {option.changes}. It saves {option.saves}; see {PAGE}")
    return lines


def check_inexact_model(names: Sequence[InexactName], model: Mapping[str, Any]) -> None:
    """ConfigError for ZenFlow with a model whose experts are tensors of three dimensions.

    `model` is the model's config.json. DeepSpeed 0.19.8 takes those for vectors
    (zenflow/zenflow_stage_1_and_2.py:216): it would choose and update the wrong elements.
    """
    kind = str(model.get("model_type"))
    if "zenflow" in names and family_of(kind).expert_keys is not None:
        raise ConfigError(
            f"zero_optimization.zenflow cannot work with experts, which model_type {kind} has: it knows matrices and "
            "vectors alone",
            hint="train a dense model, or leave zenflow out",
        )


def without_inexact(tree: Tree) -> Tree:
    """A copy of a DeepSpeed configuration without the options of `OPTIONS`."""
    zero = dict(tree.get("zero_optimization") or {})
    for key in ("zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size", "zenflow"):
        zero.pop(key, None)
    if "offload_optimizer" in zero:
        offload = zero["offload_optimizer"] or {}
        zero["offload_optimizer"] = {
            key: value for key, value in offload.items() if key not in ("super_offload", "cpuadam_cores_perc")
        }
    kept = {key: value for key, value in tree.items() if key != _COMMUNICATION}
    return kept | ({"zero_optimization": zero} if zero else {})


def _why_unasked(option: InexactOption, run: InexactRun) -> str:
    precision = run.config.train.precision
    if option.name == "bf16_reduction" and precision != "fp32":
        return f"gradients of a run with train.precision {precision} have 16 bits and are reduced so without it"
    return f"the DeepSpeed configuration does not have {option.key}"


def _check_without_name(run: InexactRun) -> None:
    """ConfigError for options that are inexact and that no name allows."""
    for path, changes in _WITHOUT_NAME.items():
        section, _, key = path.partition(".")
        if (run.tree.get(section) or {}).get(key) is True:
            raise ConfigError(f"{path} true {changes}, and no name of `inexact` allows it", hint=f"leave {key} out")
    precision = run.config.train.precision
    for key, value in _dtypes(run):
        if value == "fp16" != precision:
            raise ConfigError(
                f"{key} fp16 with train.precision {precision}: gradients may overflow in fp16, and no name of "
                "`inexact` allows it",
                hint=f"leave {key} out",
            )
    accumulated = (run.tree.get("data_types") or {}).get("grad_accum_dtype")
    if accumulated in ("bf16", "fp16") and precision == "fp32":
        raise ConfigError(
            f"data_types.grad_accum_dtype {accumulated} with train.precision fp32 rounds the sum of gradients after "
            "each forward, and no name of `inexact` allows it",
            hint="leave grad_accum_dtype out",
        )


def _dtypes(run: InexactRun) -> Iterator[tuple[str, object]]:
    """The dtypes in which gradients are reduced and accumulated, by their keys, where they are given."""
    yield _COMMUNICATION, run.tree.get(_COMMUNICATION)
    yield "data_types.grad_accum_dtype", (run.tree.get("data_types") or {}).get("grad_accum_dtype")
