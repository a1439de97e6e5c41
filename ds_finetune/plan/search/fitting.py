"""What fits into memory by the estimate: the budget of a rank, the largest micro-batch that fits, and the
changes of a run file with which a run that does not fit would.
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
"""Share of the memory that a choice leaves free: for what fragments, and for steps that need more than others."""


def largest_micro_batch(plan: Plan, model: DescribedModel, traces: Tracer, *, budget: int) -> int:
    """The most rows of a forward that divide the global batch and leave `SPARE` of `budget` bytes of the device free;
    0 where not even one row does.

    `model` is the config.json of the model. Nothing of `plan` but its batch depends on the rows.
    """
    sizes = legal_sizes(plan)
    number = bisect_left(sizes, True, key=lambda rows: not fits(bytes_of(plan, model, traces, rows), budget))
    return sizes[number - 1] if number else 0


def legal_sizes(plan: Plan) -> tuple[int, ...]:
    """The sizes of a micro-batch that go with the global batch, the ranks and the pipeline of a run, ascending."""
    group = forwards_together(plan.parallel)
    return legal_micro_batches(global_batch_size=plan.batch.global_batch_size, dp=plan.dp, group=group)


def fits(num_bytes: int, budget: int) -> bool:
    """Whether `num_bytes` leave `SPARE` of `budget` free."""
    return num_bytes <= (1 - SPARE) * budget


def bytes_of(plan: Plan, model: DescribedModel, traces: Tracer, rows: int) -> int:
    """Bytes on the device at most with forwards of `rows` rows."""
    return estimate_memory(plan_with_rows(plan, rows), model, traces).device_bytes


def chosen_recomputation(
    plan: Plan, model: DescribedModel, traces: Tracer, *, budget: int | None
) -> tuple[Recomputation, str]:
    """What `train.activation_checkpointing: auto` is on devices of `budget` bytes, None where that is not known, and
    the reason. Where the micro-batch is `auto` as well, `plan` has one row.
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
    """The numbers of `plan` with forwards of `rows` rows; the texts of its decisions stay."""
    accumulation = plan.batch.global_batch_size // (rows * plan.dp)
    return replace(
        plan,
        batch=replace(plan.batch, micro_batch_size=rows, gradient_accumulation_steps=accumulation),
        deepspeed_config=plan.deepspeed_config
        | {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": accumulation},
    )


HOST_SHARE = 3
"""Times the memory of its accelerators that a node is assumed to have, as a DGX H100 has: 2 TB for 8 x 80 GB."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a rank may take; of both, `SPARE` is left free."""

    device_bytes: int
    """Memory of its accelerator; on CPU ranks that of its host too."""
    host_bytes: int
    """Memory of its host, which the ranks of the host share."""

    def excess(self, memory: MemoryEstimate) -> int:
        """Bytes that an estimate needs beyond the budget, on the device or on the host, whichever is more; 0 where it
        fits.
        """
        return max(0, self.device_excess(memory), memory.host_bytes - self.of(self.host_bytes))

    def least_excess(self, states: StateBytes) -> int:
        """Bytes that a run needs beyond the budget at least, for its states."""
        return max(0, states.device - self.of(self.device_bytes), states.host - self.of(self.host_bytes))

    def device_excess(self, memory: MemoryEstimate) -> int:
        """Bytes that an estimate needs beyond the budget of the device; below 0 where it fits."""
        return memory.device_bytes - self.of(self.device_bytes)

    @staticmethod
    def of(num_bytes: int) -> int:
        """Bytes that may be taken of `num_bytes`."""
        return int((1 - SPARE) * num_bytes)

    def problem(self, memory: MemoryEstimate) -> str:
        """What does not fit, with both values; empty where all does."""
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
    """Values of the run file, as `KEY VALUE` joined by commas, and the bytes on the device that a run has with them."""

    text: str
    device_bytes: int


@dataclass(frozen=True)
class _Run:
    """A run on the way to one that fits, and the change that led to it."""

    settings: RunSettings
    plan: Plan
    model: DescribedModel
    traces: Tracer
    device_bytes: int
    text: str = ""

    def changes(self, budget: int) -> Iterator["_Run"]:
        """The run with each change that it could make on its own, what costs least time first."""
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
                # The combination is refused, so it would not help.
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
    """The single changes with which the run leaves enough of `budget` bytes free; where there is none, the shortest
    sequence of changes, each the one that helps most, that does; empty where nothing does.

    A run with a change is one that `make_plan` accepts; none of them changes the loss.
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
    """The first `most` changes for people, each with its GiB."""
    return "; ".join(f"{change.text} ({change.device_bytes / 2**30:,.2f} GiB)" for change in changes[:most])
