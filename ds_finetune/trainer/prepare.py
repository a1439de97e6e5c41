"""Prepares a run from its configuration, before any process group exists: plan, model, rows and learning rate.
Versions, and choices that depend on the host, are first compared between all ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.objectives import rows_of_step
from ds_finetune.config.schedule import Duration, Interval, LrSchedule, warmup_steps
from ds_finetune.config.sections import CheckpointConfig, EvalConfig, TrainConfig
from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.stream import StreamedRows
from ds_finetune.engine.devices import (
    DeviceMemory,
    PeakMemory,
    bf16_support,
    choose_device,
    read_device_memory,
)
from ds_finetune.engine.groups.default_group import JoinedRanks
from ds_finetune.model.attention.kernels import FLASH_3_MODULE
from ds_finetune.objectives.objective import Objective
from ds_finetune.observers.performance import Utilisation
from ds_finetune.observers.record import Observer
from ds_finetune.plan.checks import LENGTH_CHECKS, length_notes
from ds_finetune.plan.kernels import ChosenKernels, triton_problem
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.precision import with_precision
from ds_finetune.plan.settings import LengthSettings, RunSettings
from ds_finetune.system.info import host_versions
from ds_finetune.system.versions import installed_versions
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
    utilisation: Utilisation | None = None
    """Observer that computes MFU; None where the model FLOPs or the peak of the GPU are not known."""
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
    # Only the first host writes exports. If all hosts share the folder, each checks the space for the files of all.
    is_first_host = world.rank < world.local_world_size or not run.plan.checkpoint.node_local
    check_run_disk(
        run.output_dir, run.needs.files.of_host(run.plan, ranks=world.local_world_size, is_first_host=is_first_host)
    )
    inputs, schedule = run.inputs, run.schedule
    rows = None if isinstance(inputs.train, StreamedRows) else inputs.train.rows_per_epoch
    length = LengthSettings(run.plan, schedule, rows, run.steps_per_epoch)
    for check in LENGTH_CHECKS:
        check.raise_for(length)
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
    """Mismatched pairs of prompt and answer, for the objective's baseline (KTO's z0); None if it has no baseline."""
    if not objective.needs_baseline:
        return None
    length, is_packed = plan.train.max_seq_len, plan.data.packing
    return MismatchedAnswers(rows, seed=plan.train.seed, max_seq_len=length, is_packed=is_packed)


def check_baseline(plan: Plan, inputs: RunInputs) -> None:
    """Raise DataError if all examples have the same prompt, so that KTO's baseline cannot be computed."""
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


def check_same_versions(ranks: JoinedRanks) -> None:
    """Raise ConfigError if ranks have different versions of this program, torch, transformers or another package that
    computes. The commands `launch` and `doctor` compare hosts in the same way.
    """
    versions = host_versions(installed_versions([""]))
    compared = {name: (version, "") for name, version in versions.items() if name not in ("python", "driver")}
    ranks.check_same("versions", compared, hint="install the same versions on every host")


def check_same_precision(section: TrainConfig, ranks: JoinedRanks) -> None:
    """Raise ConfigError if `train.precision: auto` gives different precisions on different ranks."""
    if section.precision != "auto":
        return
    device = choose_device()
    train, lines = with_precision(section, device=device, support=bf16_support(device, ranks.world))
    hint = "set train.precision to one that all devices compute fast, such as fp32"
    ranks.check_same("precision", {"train.precision auto": (train.precision, lines[0])}, hint=hint)


def check_same_kernels(kernels: ChosenKernels, device: str, ranks: JoinedRanks) -> None:
    """Raise ConfigError if `model.kernels: auto` gives different kernels on different ranks, or if Triton or
    FlashAttention 3 is usable only on some ranks, e.g. because one host has no C compiler.
    """
    choices = {"model.kernels": (kernels.name, kernels.reason)}
    if device == "cuda" and kernels.has_others:
        problem, has_flash_3 = triton_problem()[0], find_spec(FLASH_3_MODULE) is not None
        choices["Triton"] = ("unusable" if problem else "usable", problem)
        choices["FlashAttention 3"] = ("installed" if has_flash_3 else "not installed", "")
    hint = "install the missing parts on every host, or set model.kernels: torch"
    ranks.check_same("kernels", choices, hint=hint)
