"""Prepares a run from its configuration, before any process group exists: plan, model, rows and learning rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.objectives import rows_of_step
from ds_finetune.config.schedule import Duration, Interval, LrSchedule, warmup_steps
from ds_finetune.config.sections import CheckpointConfig, EvalConfig
from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.stream import StreamedRows
from ds_finetune.engine.devices import DeviceMemory, PeakMemory, read_device_memory
from ds_finetune.objectives.objective import Objective
from ds_finetune.observers.record import Observer
from ds_finetune.plan.checks import check_length, length_notes
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.settings import LengthSettings, RunSettings, sections_of
from ds_finetune.trainer.inputs import RunInputs, read_inputs
from ds_finetune.trainer.resolve import ResolvedRun
from ds_finetune.trainer.run_dir import check_run_disk, check_run_folder


@dataclass(frozen=True, kw_only=True)
class PreparedRun(ResolvedRun):
    """A resolved run with its inputs and learning-rate schedule, before its process group exists."""

    inputs: RunInputs
    schedule: LrSchedule
    reference: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Reference model's log-probability of each document; keys are `train` and the names of held-out sets. Empty if
    log-probabilities are not cached.
    """
    memory: DeviceMemory | None = None
    """Free memory of this rank's device when the run was prepared; None where the system does not report it."""
    peak: PeakMemory | None = None
    """Peak memory use of this rank's device since the run was prepared; None where it is not measured."""
    observers: Sequence[Observer] = ()
    """Observers from users and other packages."""
    failed_size: Path | None = None
    """File that remembers a micro-batch that ran out of memory; None unless the micro-batch was `auto`."""

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps of an epoch, not rounded; infinite for a stream."""
        plan, rows = self.plan, self.inputs.train
        number = math.inf if isinstance(rows, StreamedRows) else rows.rows_per_epoch
        return number / rows_of_step(plan.objective, plan.rollout, plan.train.global_batch_size)

    def interval(self, section: EvalConfig | CheckpointConfig) -> Interval:
        """Interval in steps between two evaluations or two checkpoints."""
        return section.interval.in_steps(self.steps_per_epoch)


def prepare_run(resolved: ResolvedRun) -> PreparedRun:
    """Check the run folder and the disk, and tokenise the data. The time is proportional to the size of the data."""
    world, run = resolved.plan.world, read_run(resolved)
    check_run_folder(run.output_dir, run.config.checkpoint)
    # Only the first host writes exports. If all hosts share the folder, each host checks the space for the files of all
    # hosts.
    is_first_host = world.rank < world.local_world_size or not run.estimate.is_node_local
    check_run_disk(run.output_dir, run.estimate.disk(ranks=world.local_world_size, is_first_host=is_first_host))
    inputs, schedule = run.inputs, run.schedule
    rows = None if isinstance(inputs.train, StreamedRows) else inputs.train.rows_per_epoch
    length = LengthSettings(
        **sections_of(run.plan),
        steps=schedule.steps,
        warmup=schedule.warmup_steps,
        rows=rows,
        steps_per_epoch=run.steps_per_epoch,
    )
    check_length(length)
    memory, peak = read_device_memory(world, run.plan.device), PeakMemory(run.plan.device, world)
    inputs = replace(inputs, notes=(*inputs.notes, *length_notes(length)))
    return replace(run, inputs=inputs, memory=memory, peak=peak)


def read_run(resolved: ResolvedRun) -> PreparedRun:
    """Read rows and make the learning-rate schedule; ModelError, DataError or ConfigError if they are invalid."""
    inputs = read_inputs(resolved.plan, resolved.model)
    check_baseline(resolved.plan, inputs)
    schedule = make_schedule(resolved.plan, inputs.train)
    return PreparedRun(resolved.given, resolved.plan, resolved.model, inputs=inputs, schedule=schedule)


def mismatched_answers(plan: Plan, objective: Objective, rows: PreparedRows) -> MismatchedAnswers | None:
    """Mismatched pairs of prompt and answer from `rows`, for the objective's baseline (KTO's z0); None if the objective
    has no baseline.
    """
    if not objective.needs_baseline:
        return None
    length, is_packed = plan.train.max_seq_len, plan.data.packing
    return MismatchedAnswers(rows, seed=plan.train.seed, max_seq_len=length, is_packed=is_packed)


def check_baseline(plan: Plan, inputs: RunInputs) -> None:
    """DataError where the objective's baseline cannot be computed from the rows."""
    named = {"data.train": inputs.train, **{f"data.{name}": rows for name, rows in inputs.held_out.items()}}
    for name, rows in named.items():
        if not isinstance(rows, StreamedRows):
            mismatched = mismatched_answers(plan, inputs.model.objective, rows)
            if mismatched is not None:
                mismatched.check(name)


def make_schedule(run: RunSettings, rows: PreparedRows | StreamedRows) -> LrSchedule:
    """Learning-rate schedule; its length in steps depends on the rows."""
    train, optim = run.train, run.optim
    number, tokens = (0, 0.0) if isinstance(rows, StreamedRows) else (rows.rows_per_epoch, rows.tokens_per_epoch)
    steps = Duration.parse(train.duration).in_steps(
        rows=number, tokens=tokens, global_batch_size=rows_of_step(run.objective, run.rollout, train.global_batch_size)
    )
    return LrSchedule(
        name=optim.lr_scheduler,
        lr=optim.lr,
        min_lr_ratio=optim.min_lr_ratio,
        warmup_steps=warmup_steps(optim.warmup, steps),
        steps=steps,
    )
