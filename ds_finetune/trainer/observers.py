"""The observers of a run: what happens after each step, from evaluation and checkpoints to the progress line."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ds_finetune.checkpoint.saver import Saver
from ds_finetune.cluster.watchdog.progress import RankProgress, Stragglers
from ds_finetune.config.schedule import Duration
from ds_finetune.config.sections import EvalConfig
from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.data.batches import num_eval_rows
from ds_finetune.data.stream import StreamedRows
from ds_finetune.engine.engine import Engine
from ds_finetune.observers.checkpointing import Checkpointing, CheckpointPolicy
from ds_finetune.observers.evaluation import BestAndPatience, Evaluation
from ds_finetune.observers.performance import Utilisation, peak_flops
from ds_finetune.observers.progress import ANSWERS, EVALUATION, EXPORT, SAVE, ProgressLine, TimeLeft
from ds_finetune.observers.record import Observer, Resumable
from ds_finetune.observers.routers import (
    ExpertTable,
    ExpertTableWriter,
    LoadWatch,
    RouterMetrics,
    TableLayout,
    load_advice,
)
from ds_finetune.observers.samples import SampleFile
from ds_finetune.observers.stopping import SkippedSteps, StopSignals
from ds_finetune.observers.trackers import Trackers
from ds_finetune.observers.writers import MetricsFile, RankTimesFile
from ds_finetune.trainer.evaluation import evaluation_functions
from ds_finetune.trainer.exports import Exports
from ds_finetune.trainer.forecast import forecast_check
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.resume import ResumePoint, make_state_text, restore_observers

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class StartedRun:
    """A run whose engine is running, what it resumes from, and what writes its files; `saver` is None where the run
    saves no checkpoints.
    """

    run: PreparedRun
    engine: Engine
    resume_point: ResumePoint
    saver: Saver | None
    exports: Exports
    rank_progress: RankProgress
    store: dist.Store
    """Where the ranks met."""
    say: Say
    log: Say
    """Adds a line to the run's log without printing it."""


def make_observers(started: StartedRun, signals: StopSignals) -> list[Observer]:
    """The observers in the order in which they see a record, with what they remembered at the checkpoint."""
    config, plan = started.run.config, started.run.plan
    left, skipped = make_time_left(started.run), SkippedSteps(config.train.max_skipped_steps)
    observers: list[Observer] = []
    if plan.world.world_size > 1:
        observers.append(Stragglers(started.rank_progress, config.log.every, config.watchdog.straggler_ratio))
    observers += [skipped, *_utilisation(started.run), _forecast_check(started)]
    resumable: dict[str, Resumable] = {"skipped": skipped}
    routers = _router_observers(started)
    observers += routers.values()
    resumable |= routers
    samples = _sample_file(started)
    if started.run.inputs.held_out:
        evaluation, best = _evaluation(started, left, signals, samples)
        observers += [evaluation, best]
        resumable |= {"evaluation": evaluation, "best": best}
    restore_observers(resumable, started.resume_point)
    observers += [*([] if samples is None else [samples]), *_expert_table(started)]
    if started.saver is not None:
        observers.append(_checkpointing(started, started.saver, left, signals, resumable))
    return [*observers, *(_writers(started, left) if started.engine.is_rank_zero else [])]


def make_time_left(run: PreparedRun) -> TimeLeft:
    """The estimate of the remaining time, with what is known before the first step."""
    config, held_out = run.config, run.inputs.held_out
    saves = config.checkpoint.interval.steps
    every = {SAVE: 0 if math.isinf(saves) else int(saves)} if config.checkpoint.saves else {}
    steps = 0.0
    if held_out:
        every |= {EVALUATION: _evaluates_every(config.eval), ANSWERS: _evaluates_every(config.eval)}
        # A forward is about a third of a step's work on a row.
        num_rows = sum(num_eval_rows(rows, config.eval.limit) for rows in held_out.values())
        steps = num_rows / config.train.global_batch_size / 3
    exported = run.estimate.files.exports * run.estimate.files.export_bytes
    return TimeLeft(
        run.schedule.steps, every, evaluation_steps=steps, export_bytes=exported, verifies=config.export.verify
    )


def _forecast_check(started: StartedRun) -> Observer:
    is_first = started.engine.is_rank_zero
    say, log = (started.say, started.log) if is_first else (say_nothing, say_nothing)
    return forecast_check(started.run, say=say, log=log)


def _router_observers(started: StartedRun) -> dict[str, RouterMetrics | LoadWatch]:
    """The observers of experts' loads by name; none for a model without routed experts."""
    run, router = started.run, started.run.inputs.model.router
    if router is None:
        return {}
    say = started.say if started.engine.is_rank_zero else say_nothing
    return {
        "router_metrics": RouterMetrics(run.plan.mesh.ep, router.section.bias_update),
        "load_watch": LoadWatch(run.schedule.steps, load_advice(run.plan.lora, run.plan.router), say),
    }


def _expert_table(started: StartedRun) -> list[Observer]:
    """What writes the loads of experts on rank zero, before a checkpoint of the same step is saved."""
    router = started.run.inputs.model.router
    if router is None or not started.engine.is_rank_zero:
        return []
    layout = TableLayout(router.layers, router.experts)
    table = ExpertTable(started.run.output_dir / "experts.bin", layout, after_step=started.resume_point.progress.step)
    return [ExpertTableWriter(table, every=layout.steps_between(started.run.schedule.steps), say=started.say)]


def _sample_file(started: StartedRun) -> SampleFile | None:
    """What keeps generated answers on rank zero; None where evaluations generate none."""
    run = started.run
    if not (run.inputs.held_out and run.config.eval.generate.prompts and started.engine.is_rank_zero):
        return None
    return SampleFile(run.output_dir / "samples.jsonl", started.say)


def _evaluation(
    started: StartedRun, left: TimeLeft, signals: StopSignals, samples: SampleFile | None
) -> tuple[Evaluation, BestAndPatience]:
    config, progress = started.run.config, started.rank_progress
    collect = None if samples is None else samples.collect
    evaluate, exact_match = evaluation_functions(started.run, started.engine, signals, collect=collect)
    evaluation = Evaluation(
        _evaluates_every(config.eval),
        left.measure(EVALUATION, _in_phase(progress, "evaluation", evaluate)),
        exact_match and left.measure(ANSWERS, _in_phase(progress, "evaluation", exact_match)),
    )
    write_best = _in_phase(progress, "export", started.exports.write_best)
    return evaluation, BestAndPatience(config.eval, left.measure(EXPORT, write_best))


def _checkpointing(
    started: StartedRun, saver: Saver, left: TimeLeft, signals: StopSignals, resumable: dict[str, Resumable]
) -> Checkpointing:
    policy = started.run.config.checkpoint
    kept = CheckpointPolicy(policy.interval, policy.keep, policy.keep_best, policy.max_failed)
    state_text, saving = make_state_text(started.run, started.engine), partial(_saving, started.rank_progress, left)
    return Checkpointing(saver, signals, kept, resumable, state_text, started.say, saving)


def _writers(started: StartedRun, left: TimeLeft) -> list[Observer]:
    """The observers of rank zero, which writes files and prints."""
    run, say = started.run, started.say
    tree = run.config.model_dump(mode="json", by_alias=True)
    is_resumed = started.resume_point.progress.step > 0
    return [
        MetricsFile(run.output_dir / "metrics.jsonl", say),
        *([RankTimesFile(run.output_dir / "ranks.jsonl", say)] if run.plan.world.world_size > 1 else []),
        Trackers.open(run.config.log.trackers, run.output_dir, tree, say, is_resumed=is_resumed),
        ProgressLine(steps=run.schedule.steps, every=run.config.log.every, left=left, log=started.log),
    ]


def _in_phase(progress: RankProgress, phase: str, function: Callable[P, R]) -> Callable[P, R]:
    """The same function, run as a phase of its own for the watchdog."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with progress.during(phase):
            return function(*args, **kwargs)

    return call


@contextmanager
def _saving(progress: RankProgress, left: TimeLeft) -> Iterator[None]:
    with progress.during("save"), left.during(SAVE):
        yield


def _evaluates_every(section: EvalConfig) -> int:
    """Steps between evaluations; 0 where there is one at the end alone."""
    return int(Duration.parse(section.every).value) if section.every else 0


def _utilisation(run: PreparedRun) -> list[Observer]:
    plan, shape, rows = run.plan, run.inputs.shape, run.inputs.train
    peak = peak_flops(torch.cuda.get_device_name()) if plan.device == "cuda" else None
    # The formula counts the FLOPs of training every weight.
    if shape is None or peak is None or run.config.lora is not None:
        return []
    attended = None if isinstance(rows, StreamedRows) else rows.mean_attended
    flops = shape.flops_per_token(plan.batch.max_seq_len, mean_attended=attended)
    return [Utilisation(flops, peak, plan.world.world_size)]
