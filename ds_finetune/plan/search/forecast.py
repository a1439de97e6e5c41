"""Plans a run for machines that need not be available: whether it fits, its memory and its layout."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_finetune.config.units import GIB
from ds_finetune.plan.batch import AUTO
from ds_finetune.plan.estimate.memory import MemoryEstimate, RunMemory
from ds_finetune.plan.estimate.traced import Tracer
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.plan.model_shape import parameters_text
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.plan import check_largest_slice, make_plan
from ds_finetune.plan.search.candidates import Candidates, check_run
from ds_finetune.plan.search.fitting import SPARE, chosen_recomputation, largest_micro_batch, usable
from ds_finetune.plan.search.machines import Target
from ds_finetune.plan.settings import RunSettings
from ds_finetune.plan.trained_parts import plan_freezing, plan_indexer, plan_routers

UNCONFIRMED = "No GPU has confirmed the estimates of memory."


@dataclass(frozen=True)
class Forecast:
    """The plan of a run on the machines of `target`, and the memory that the run needs there."""

    run: RunMemory
    stages: tuple[StageLayers | None, ...]
    memory: MemoryEstimate
    target: Target

    def lines(self) -> Iterator[tuple[str, str]]:
        """Plan lines of the run: name and text of each decision."""
        model, plan = self.run.model, self.run.plan
        if (gpu := self.target.gpu) is not None:
            peak = f"{gpu.peak(plan.precision) / 1e12:,.4g} TFLOP/s in {plan.precision}"
            yield "GPU", f"{gpu.name}: {gpu.memory_bytes / GIB:,.1f} GiB, {peak} at most"
        yield from plan.decisions
        yield from plan.model_lines(model, self.stages)
        freezing = plan_freezing(model.tensors.by_name, only=plan.train.only, freeze=plan.train.freeze)
        for decided in (plan_routers(plan.router, model), plan_indexer(plan.indexer, model), freezing):
            yield from decided.lines() if decided is not None else ()
        yield "parameters", parameters_text(model)

    def notes(self) -> tuple[str, ...]:
        """Notes below the plan: what the estimate leaves out or assumes, and settings that the plan has rewritten."""
        resized = "rows that model.resize_vocabulary may add to embedding and head are not counted"
        unconfirmed = () if self.run.plan.device == "cpu" else (UNCONFIRMED,)
        notes = (*unconfirmed, *self.run.plan.notes, *((resized,) if self.run.plan.model.resize_vocabulary else ()))
        return (*notes, *self.target.notes)

    def verdict(self) -> str:
        """Whether the run fits the machines and by how much, or which information is missing for an answer."""
        budget, memory, name = self.target.budget, self.memory, self.target.name
        need = memory.device_bytes / GIB
        if budget is None:
            text = "whether that fits is known with --gpu NAME, e.g. --gpu h100-80g, or --gpu-memory 40GiB"
            return f"a rank needs {need:,.1f} GiB on its device; {text}"
        if problem := budget.problem(memory):
            excess = f"{budget.excess(memory) / GIB:,.1f} GiB too much on a rank"
            return f"does not fit {name}: {excess}, which {problem} ({SPARE:.0%} stay free); --search lists what fits"
        most = usable(budget.device_bytes) / GIB
        return (
            f"fits {name}, with {most - need:,.1f} GiB to spare on a rank: it needs {need:,.1f} GiB of {most:,.1f} GiB "
            f"({SPARE:.0%} stay free)"
        )

    def tree(self) -> dict[str, Any]:
        """The forecast as JSON values."""
        memory, budget = self.memory, self.target.budget
        return {
            "verdict": self.verdict(),
            "decisions": dict(self.lines()),
            "parallel": self.run.plan.parallel.model_dump(mode="json"),
            "dp": self.run.plan.dp,
            "zero_stage": self.run.plan.zero_stage,
            "micro_batch_size": self.run.plan.micro_batch_size,
            "memory": memory_tree(memory),
            "fits": None if budget is None else not budget.excess(memory),
            "deepspeed": self.run.plan.deepspeed_config,
            "notes": list(self.notes()),
        }


def memory_tree(memory: MemoryEstimate) -> dict[str, Any]:
    """A memory estimate as JSON values."""
    totals = ("stage", "device_bytes", "host_bytes", "disk_bytes")
    return {name: getattr(memory, name) for name in totals} | {"rows": [asdict(row) for row in memory.rows]}


def forecast_run(given: RunSettings, target: Target, model: DescribedModel, traces: Tracer) -> Forecast:
    """Plan the run for the machines of `target`; ConfigError or ModelError as `train` raises them before loading."""
    plan = make_plan(given, world=target.ranks.world, device=target.ranks.device)
    check_run(given, model)
    # An illegal layout is refused before activations are traced, because tracing takes seconds.
    stages = Candidates(given, model, target.ranks).check(given).stages
    run, budget = RunMemory(plan, model, traces), None if target.budget is None else target.budget.device_bytes
    if given.train.activation_checkpointing == AUTO:
        chosen, reason = chosen_recomputation(run, budget=budget)
        plan = plan.with_recomputation(chosen).with_lines(("recomputation", f"{chosen} (auto: {reason})"))
        run = run.with_plan(plan)
    if given.train.micro_batch_size == AUTO:
        rows, text = _largest_rows(run, budget)
        run = run.with_plan(plan.with_rows(rows).with_lines(("micro batch", text)))
    kinds = (kind for stage in run.weights for kind in stage.kinds)
    check_largest_slice(run.plan, ((kind.numel // kind.count, kind.name) for kind in kinds))
    run = replace(run, budget=budget)
    return Forecast(run, stages, run.estimate(), target)


def _largest_rows(run: RunMemory, budget: int | None) -> tuple[int, str]:
    if budget is None:
        return 1, "1 (auto: how many rows fit is known with --gpu NAME)"
    rows = largest_micro_batch(run, budget=budget)
    if not rows:
        return 1, "1 (auto: not even forwards of one row fit)"
    return rows, f"{rows} (auto: the largest that leaves {SPARE:.0%} of the device free by this estimate)"
