"""What fits into memory by the estimate: the budget of a rank, the largest micro-batch, and changes to a run file with
which a run would fit.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_finetune.config.units import GIB
from ds_finetune.errors import FinetuneError
from ds_finetune.plan.batch import legal_micro_batches
from ds_finetune.plan.deepspeed_config import read_choices
from ds_finetune.plan.estimate.memory import MemoryEstimate, StateBytes, estimate_memory
from ds_finetune.plan.estimate.traced import Tracer
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.pipeline import forwards_together
from ds_finetune.plan.plan import Plan, Recomputation, make_plan
from ds_finetune.plan.settings import RunSettings

SPARE = 0.07
"""Share of the memory that stays free, for fragmentation and for steps that need more than others."""


def largest_micro_batch(plan: Plan, model: DescribedModel, traces: Tracer, *, budget: int) -> int:
    """Largest micro-batch that divides the global batch and leaves `SPARE` of the device's `budget` bytes free; 0 where
    one row does not fit.

    `model` is the config.json of the model. Only the batch of `plan` depends on the result.
    """
    sizes = legal_sizes(plan)
    number = bisect_left(sizes, True, key=lambda rows: not fits(bytes_of(plan, model, traces, rows), budget))
    return sizes[number - 1] if number else 0


def legal_sizes(plan: Plan) -> tuple[int, ...]:
    """Micro-batch sizes that are legal for the global batch, the ranks and the pipeline of a run, ascending."""
    group = forwards_together(plan.parallel)
    return legal_micro_batches(global_batch_size=plan.batch.global_batch_size, dp=plan.dp, group=group)


def fits(num_bytes: int, budget: int) -> bool:
    """Whether `num_bytes` leave `SPARE` of `budget` free."""
    return num_bytes <= (1 - SPARE) * budget


def bytes_of(plan: Plan, model: DescribedModel, traces: Tracer, rows: int) -> int:
    """Peak bytes on the device with micro-batches of `rows` rows."""
    return estimate_memory(plan_with_rows(plan, rows), model, traces).device_bytes


def chosen_recomputation(
    plan: Plan, model: DescribedModel, traces: Tracer, *, budget: int | None
) -> tuple[Recomputation, str]:
    """Resolve `train.activation_checkpointing: auto` for devices of `budget` bytes (None: unknown), with the reason. If
    the micro-batch is `auto` too, `plan` has one row.
    """
    if plan.device == "cpu":
        return "full", "on CPUs"
    if budget is None:
        return "full", "the memory of the GPU is not known; selective where it fits"
    rows = plan.batch.micro_batch_size
    try:
        need = bytes_of(replace(plan, activation_checkpointing="selective"), model, traces, rows)
    except FinetuneError as unknown:
        return "full", f"its memory is not known: {unknown.message}"
    text = f"{need / GIB:.1f} of {budget / GIB:.1f} GiB by the estimate at micro-batch {rows}"
    if fits(need, budget):
        return "selective", f"it takes {text}"
    return "full", f"selective would take {text}, and {SPARE:.0%} stay free"


def plan_with_rows(plan: Plan, rows: int) -> Plan:
    """The plan with micro-batches of `rows` rows; the texts of its decisions do not change."""
    accumulation = plan.batch.global_batch_size // (rows * plan.dp)
    return replace(
        plan,
        batch=replace(plan.batch, micro_batch_size=rows, gradient_accumulation_steps=accumulation),
        deepspeed_config=plan.deepspeed_config
        | {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": accumulation},
    )


HOST_SHARE = 3
"""Assumed memory of a node relative to that of its accelerators, as in a DGX H100: 2 TB for 8 x 80 GB."""


@dataclass(frozen=True)
class Budget:
    """Memory of a rank in bytes; `SPARE` of it is left free."""

    device_bytes: int
    """Memory of the rank's accelerator; for CPU ranks that of the host."""
    host_bytes: int
    """Memory of the rank's host, which the ranks of the host share."""

    def excess(self, memory: MemoryEstimate) -> int:
        """Bytes by which an estimate exceeds the budget of the device or of the host, whichever is more; 0 where it
        fits.
        """
        return max(0, self.device_excess(memory), memory.host_bytes - self.of(self.host_bytes))

    def least_excess(self, states: StateBytes) -> int:
        """Lower bound of the bytes by which a run exceeds the budget, from its states."""
        return max(0, states.device - self.of(self.device_bytes), states.host - self.of(self.host_bytes))

    def device_excess(self, memory: MemoryEstimate) -> int:
        """Bytes by which an estimate exceeds the budget of the device; negative where it fits."""
        return memory.device_bytes - self.of(self.device_bytes)

    @staticmethod
    def of(num_bytes: int) -> int:
        """Usable bytes out of `num_bytes`."""
        return int((1 - SPARE) * num_bytes)

    def problem(self, memory: MemoryEstimate) -> str:
        """What does not fit, with needed and available bytes; empty where everything fits."""
        device = (memory.device_bytes, self.of(self.device_bytes), "on its device")
        host = (memory.host_bytes, self.of(self.host_bytes), "in its share of the host's memory")
        # The device of a CPU rank is its host.
        places = (host,) if memory.device == "host" else (device, host)
        texts = [f"{_gib(need)} of {_gib(most)} {where}" for need, most, where in places if need > most]
        return f"needs {' and '.join(texts)}" if texts else ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"


_HIGHEST_STAGE = 3


@dataclass(frozen=True)
class FittingChange:
    """Values of the run file, as `KEY VALUE` joined by commas, and the device bytes of the run with them."""

    text: str
    device_bytes: int


@dataclass(frozen=True)
class _Run:
    """A run after some changes, and the last change."""

    settings: RunSettings
    plan: Plan
    model: DescribedModel
    traces: Tracer
    device_bytes: int
    text: str = ""

    def changes(self, budget: int) -> Iterator["_Run"]:
        """The run with each single change, those that cost least time first."""
        for text, train, zero in self._keys(budget):
            given = {"micro_batch_size": self.plan.batch.micro_batch_size, **train}
            updates: dict[str, Any] = {"train": self.settings.train.model_copy(update=given)}
            if zero:
                tree = read_choices(self.settings.deepspeed)[0] if self.settings.deepspeed else {}
                section = {**(tree.get("zero_optimization") or {"stage": self.plan.zero_stage}), **zero}
                updates["deepspeed"] = {**tree, "zero_optimization": section}
            settings = replace(self.settings, **updates)
            try:
                plan = make_plan(settings, world=self.plan.world, device=self.plan.device)
                size = estimate_memory(plan, self.model, self.traces).device_bytes
                yield _Run(settings, plan, self.model, self.traces, size, text)
            except FinetuneError:
                # The changed run would be refused.
                continue

    def _keys(self, budget: int) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Text of a change, keys of the section `train`, and keys of DeepSpeed's `zero_optimization`."""
        train, plan = self.settings.train, self.plan
        rows = largest_micro_batch(plan, self.model, self.traces, budget=budget) or 1
        if rows < plan.batch.micro_batch_size:
            yield f"train.micro_batch_size {rows}", {"micro_batch_size": rows}, {}
        for stage in range(plan.zero_stage + 1, _HIGHEST_STAGE + 1 if plan.world.world_size > 1 else 0):
            yield f"zero_optimization.stage {stage}", {}, {"stage": stage}
        if plan.activation_checkpointing != "full":
            yield "train.activation_checkpointing full", {"activation_checkpointing": "full"}, {}
        if not train.tiled_mlp:
            yield "train.tiled_mlp true", {"tiled_mlp": True}, {}
        if plan.device == "cpu":
            return
        if not train.activation_offload:
            on = {"activation_offload": True, "activation_checkpointing": "full"}
            yield "train.activation_offload true", on, {}
        if plan.offload_optimizer == "none":
            yield "offload_optimizer.device cpu", {}, {"offload_optimizer": {"device": "cpu"}}
        if plan.offload_param == "none" and plan.zero_stage == _HIGHEST_STAGE:
            yield "offload_param.device cpu", {}, {"offload_param": {"device": "cpu"}}


def fitting_changes(
    settings: RunSettings, plan: Plan, model: DescribedModel, traces: Tracer, *, budget: int
) -> tuple[FittingChange, ...]:
    """Single changes with which the run leaves enough of `budget` bytes free; if there are none, the shortest sequence
    of changes that does, each the one that saves most; empty if nothing suffices.

    `make_plan` accepts a run with these changes, and none of them changes the loss.
    """
    size = estimate_memory(plan, model, traces).device_bytes
    run, texts = _Run(settings, plan, model, traces, size), list[str]()
    changes = list(run.changes(budget))
    if single := [change for change in changes if fits(change.device_bytes, budget)]:
        return tuple(FittingChange(change.text, change.device_bytes) for change in single)
    while helpful := [change for change in changes if change.device_bytes < run.device_bytes]:
        run = min(helpful, key=lambda change: change.device_bytes)
        texts.append(run.text)
        if fits(run.device_bytes, budget):
            return (FittingChange(", ".join(texts), run.device_bytes),)
        changes = list(run.changes(budget))
    return ()


def first_texts(changes: Sequence[FittingChange], most: int) -> str:
    """Text with the first `most` changes and the GiB of each."""
    return "; ".join(f"{change.text} ({change.device_bytes / 2**30:,.2f} GiB)" for change in changes[:most])
