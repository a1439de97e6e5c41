"""Observers of a run, which act after each step, e.g. evaluate, save checkpoints or print the progress line."""

import math
import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch.distributed as dist

from ds_finetune.checkpoint.saver import Saver
from ds_finetune.cluster.watchdog.progress import RECENT_STEPS, RankProgress
from ds_finetune.console.phase_line import PhaseLine, Say
from ds_finetune.data.batches import BatchPlan, MicroBatch, eval_baseline, eval_batches, num_eval_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object, all_gather_scalar
from ds_finetune.engine.results import HeldOutScores
from ds_finetune.engine.sampling.answers import SamplingLimits
from ds_finetune.observers.checkpointing import Checkpointing
from ds_finetune.observers.evaluation import BestAndPatience, Evaluation, matches
from ds_finetune.observers.outside import OutsideObservers
from ds_finetune.observers.progress import ANSWERS, EVALUATION, EXPORT, SAVE, ProgressLine, TimeLeft
from ds_finetune.observers.record import Observer, Resumable, StepRecord
from ds_finetune.observers.routers import (
    ExpertLoadsFile,
    LoadWatch,
    RouterMetrics,
    load_advice,
)
from ds_finetune.observers.stopping import SkippedSteps, StopSignals
from ds_finetune.observers.trackers import Trackers
from ds_finetune.observers.writers import MOST_SAMPLES, MetricsFile, RankTimesFile, SampleFile
from ds_finetune.runs.folder import EXPERTS
from ds_finetune.runs.metrics import Sample
from ds_finetune.trainer.batches import batch_plan
from ds_finetune.trainer.exports import Exports
from ds_finetune.trainer.forecast import forecast_check
from ds_finetune.trainer.prepare import PreparedRun, mismatched_answers
from ds_finetune.trainer.resume import ResumePoint, make_state_text
from ds_finetune.trainer.rollouts.observer import (
    ALL_SETS,
    LOSS_NOTE,
    Collect,
    RewardEvaluation,
    RolloutMetrics,
    RolloutSamples,
)
from ds_finetune.trainer.rollouts.source import RolloutSource
from ds_finetune.trainer.run_records import synchronise_records

Scored = Callable[[], Mapping[str, HeldOutScores] | None]
Answered = Callable[[], Mapping[str, float] | None]


@dataclass(frozen=True)
class StartedRun:
    """A run with its engine, resume point, and writers of files. `saver` is None if the run saves no checkpoints."""

    run: PreparedRun
    engine: Engine
    resume_point: ResumePoint
    saver: Saver | None
    exports: Exports
    rank_progress: RankProgress
    store: dist.Store
    """Store through which the ranks have found each other."""
    say: Say
    """Function that prints a line on rank zero."""
    log: Say
    """Function that adds a line to the run's log without printing it."""


def make_observers(started: StartedRun, signals: StopSignals, rollouts: RolloutSource | None = None) -> list[Observer]:
    """Make the observers, in the order in which they get records, with states restored from the checkpoint."""
    config, plan = started.run.config, started.run.plan
    time_left = make_time_left(started.run)
    skipped = SkippedSteps(config.train.max_skipped_steps, plan.precision)
    observers: list[Observer] = []
    if plan.world.world_size > 1:
        observers.append(Stragglers(started.rank_progress, config.log.every, config.watchdog.straggler_ratio))
    observers += [skipped, *([] if started.run.utilisation is None else [started.run.utilisation])]
    observers.append(forecast_check(started.run, say=started.say, log=started.log))
    resumable: dict[str, Resumable] = {"skipped": skipped}
    routers = _router_observers(started)
    observers += routers.values()
    resumable |= routers
    if rollouts is not None:
        if not started.resume_point.progress.step:
            started.say(LOSS_NOTE)
        metrics = RolloutMetrics(rollouts, started.say)
        observers.append(metrics)
        resumable |= {"rollouts": rollouts, "rollout_metrics": metrics}
    samples = _sample_file(started)
    if started.run.inputs.held_out:
        evaluation, best = _evaluation(started, time_left, signals, samples, rollouts)
        observers += [evaluation, best]
        resumable |= {"evaluation": evaluation, "best": best}
    if started.run.observers:
        observers.append(OutsideObservers(started.run.observers, all_gather_object))
    started.resume_point.restore(resumable)
    observers += [*([] if samples is None else [samples]), *_expert_loads_file(started)]
    if started.saver is not None:
        observers.append(_checkpointing(started, started.saver, time_left, signals, resumable))
    return [*observers, *(_writers(started, time_left, rollouts) if started.engine.is_rank_zero else [])]


def make_time_left(run: PreparedRun) -> TimeLeft:
    """Make the estimator of the remaining time of a run, before its first step."""
    config, held_out = run.config, run.inputs.held_out
    intervals = {SAVE: run.interval(config.checkpoint)} if config.checkpoint.saves else {}
    steps = 0.0
    if held_out:
        intervals |= dict.fromkeys((EVALUATION, ANSWERS), run.interval(config.eval))
        # Evaluating a row takes about a third of the time of training on it, since there is no backward.
        num_rows = sum(num_eval_rows(rows, config.eval.limit) for rows in held_out.values())
        steps = num_rows / config.train.global_batch_size / 3
    return TimeLeft(run.schedule.steps, intervals, evaluation_steps=steps)


def _router_observers(started: StartedRun) -> dict[str, RouterMetrics | LoadWatch]:
    run, router = started.run, started.run.model.router
    if router is None:
        return {}
    without_bias = tuple(map(router.layers.index, router.by_id))
    return {
        "router_metrics": RouterMetrics(run.plan.mesh.ep, router.section.bias_update, without_bias),
        "load_watch": LoadWatch(run.schedule.steps, load_advice(run.plan.lora, run.plan.router), started.say),
    }


def _expert_loads_file(started: StartedRun) -> list[Observer]:
    """A list with the writer of expert loads, on rank zero. It writes before a checkpoint of the step is saved."""
    run, router = started.run, started.run.model.router
    if router is None or not started.engine.is_rank_zero:
        return []
    path, steps = run.output_dir / EXPERTS, run.schedule.steps
    return [ExpertLoadsFile(path, router.layers, router.experts, steps=steps, say=started.say)]


def _sample_file(started: StartedRun) -> SampleFile | None:
    run = started.run
    is_answered = run.config.eval.generate.prompts or run.model.objective.head == "answers"
    if not (run.inputs.held_out and is_answered and started.engine.is_rank_zero):
        return None
    return SampleFile(run.output_dir / "samples.jsonl", started.say)


def _evaluation(
    started: StartedRun,
    time_left: TimeLeft,
    signals: StopSignals,
    samples: SampleFile | None,
    rollouts: RolloutSource | None,
) -> tuple[Evaluation, BestAndPatience]:
    config, progress = started.run.config, started.rank_progress
    collect = None if samples is None else samples.collect
    held_out = HeldOutEvaluation(started.run, started.engine, signals, collect)
    evaluate: Scored = held_out.scores
    exact_match: Answered | None = held_out.exact_match if config.eval.generate.prompts else None
    if rollouts is not None:
        evaluate = RewardEvaluation(rollouts, signals.is_stop_requested, collect).scores
    evaluation = Evaluation(
        started.run.interval(config.eval),
        time_left.during(EVALUATION)(progress.during("evaluation")(evaluate)),
        exact_match and time_left.during(ANSWERS)(progress.during("evaluation")(exact_match)),
    )
    write_best = progress.during("export")(started.exports.write_best)
    return evaluation, BestAndPatience(config.eval, time_left.during(EXPORT)(write_best))


def _checkpointing(
    started: StartedRun, saver: Saver, time_left: TimeLeft, signals: StopSignals, resumable: dict[str, Resumable]
) -> Checkpointing:
    run, config = started.run, started.run.config.checkpoint
    state_text, saving = make_state_text(run, started.engine), partial(_saving, started, time_left)
    return Checkpointing(saver, signals, config, run.interval(config), resumable, state_text, started.say, saving)


def _writers(started: StartedRun, time_left: TimeLeft, rollouts: RolloutSource | None) -> list[Observer]:
    run, say = started.run, started.say
    is_resumed = started.resume_point.progress.step > 0
    return [
        time_left,
        MetricsFile(run.output_dir / "metrics.jsonl", say),
        *([] if rollouts is None else [RolloutSamples(run.output_dir, rollouts, say)]),
        *([RankTimesFile(run.output_dir / "ranks.jsonl", say)] if run.plan.world.world_size > 1 else []),
        Trackers(run.config.log.trackers, run.output_dir, run.tree, say, is_resumed=is_resumed),
        ProgressLine(
            steps=run.schedule.steps, section=run.config.log, steps_per_epoch=run.steps_per_epoch, log=started.log
        ),
    ]


@contextmanager
def _saving(started: StartedRun, time_left: TimeLeft) -> Iterator[None]:
    with started.rank_progress.during("save"), time_left.during(SAVE):
        if started.engine.is_rank_zero:
            synchronise_records(started.run.output_dir)
        yield


@dataclass(frozen=True)
class HeldOutEvaluation:
    """Evaluates the held-out sets: their loss, and exact matches of generated answers. Results are keyed by the first
    part of metric names: `eval` for all rows, `eval/NAME` for a named set. They are None after a signal.
    """

    run: PreparedRun
    engine: Engine
    signals: StopSignals
    collect: Collect | None = None
    """Function that receives the first generated answers of each set."""

    def scores(self) -> Mapping[str, HeldOutScores] | None:
        """Scores of each held-out set, and of all sets, whose rows are scored together as if in one set."""
        plan, sets, limit = batch_plan(self.run), self.run.inputs.held_out, self.run.config.eval.limit
        per_round = plan.micro_batch_size * plan.dp
        rounds = sum(math.ceil(num_eval_rows(rows, limit) / per_round) for rows in sets.values())
        scores_of: dict[str, HeldOutScores] = {}
        with PhaseLine("evaluation", rounds, is_rank_zero=self.engine.is_rank_zero) as line:
            is_over = line.before_each(self.signals.is_stop_requested)
            for name, rows in sets.items():
                plan = replace(plan, reference=self.run.reference.get(name))
                scores = self.engine.evaluate(
                    eval_batches(rows, plan, limit=limit), baseline=self._baseline(rows, plan), is_over=is_over
                )
                if scores is None:
                    return None
                scores_of[name] = scores
        return scores_of if ALL_SETS in scores_of else {ALL_SETS: self.engine.pool(scores_of.values()), **scores_of}

    def exact_match(self) -> Mapping[str, float] | None:
        """Fraction of exact matches among answers to the first prompts of each set, and of all sets together."""
        generate, dp = self.run.config.eval.generate, batch_plan(self.run).dp
        limits = SamplingLimits(generate.max_new_tokens, tuple(self.run.inputs.stop_ids))
        pairs = {name: rows.prompts_and_answers(generate.prompts) for name, rows in self.run.inputs.held_out.items()}
        answers: dict[str, tuple[list[str], list[str]]] = {}
        rounds = sum(math.ceil(len(of_set) / dp) for of_set in pairs.values())
        with PhaseLine("answers", rounds, is_rank_zero=self.engine.is_rank_zero) as line:
            is_over = line.before_each(self.signals.is_stop_requested)
            for name, of_set in pairs.items():
                ids = self.engine.generate([prompt for prompt, _ in of_set], limits, is_over=is_over)
                if ids is None:
                    return None
                answers[name] = (self._texts(ids), self._texts([answer for _, answer in of_set]))
        if self.collect is not None:
            self.collect([sample for name in pairs for sample in self._samples(name, pairs[name], *answers[name])])
        fractions = {name: matches(*of_set) for name, of_set in answers.items()}
        generated, expected = ([text for of_set in answers.values() for text in of_set[side]] for side in (0, 1))
        return {ALL_SETS: matches(generated, expected), **fractions}

    def _baseline(self, rows: PreparedRows, plan: BatchPlan) -> Iterator[MicroBatch]:
        mismatched = mismatched_answers(self.run.plan, self.engine.objective, rows)
        return iter(()) if mismatched is None else eval_baseline(mismatched, plan, limit=self.run.config.eval.limit)

    def _samples(
        self, name: str, pairs: Sequence[tuple[list[int], list[int]]], generated: list[str], expected: list[str]
    ) -> Iterator[Sample]:
        """Yield samples of a held-out set: its first prompts with answers. SampleFile replaces their step 0."""
        rows = list(zip(pairs, generated, expected, strict=True))[:MOST_SAMPLES]
        for (prompt, _), answer, of_data in rows:
            yield Sample(0, name, self.run.inputs.tokenizer.decode(prompt), answer, of_data)

    def _texts(self, answers: list[list[int]]) -> list[str]:
        return [self.run.inputs.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]


_NOTICEABLE_SECONDS = 0.05
"""Differences between ranks of fewer seconds than this are noise, e.g. in small models."""
_LEAST_STEPS = 5
"""Minimum number of steps in a median, so that a rank that pauses in a single step does not count as slow."""


@dataclass
class Stragglers(Observer):
    """Every `every` steps, adds `perf/straggler_ratio`: the step time of the slowest rank over the median of all ranks.
    The step time of a rank is the median over its last `every` steps, at least five, without the time in collectives,
    in which the other ranks wait for the slow one. All ranks gather the times at these steps. `record.slow` names a
    rank whose ratio is `ratio` or more.
    """

    progress: RankProgress
    every: int
    ratio: float
    hosts: list[str] = field(default_factory=list)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the straggler ratio to the record every `every` steps, at which this call is collective."""
        window = max(self.every, _LEAST_STEPS)
        if record.step % self.every or len(self.progress.own_seconds) < min(window, RECENT_STEPS):
            return record
        self.hosts = self.hosts or all_gather_object(socket.gethostname())
        seconds = all_gather_scalar(statistics.median(list(self.progress.own_seconds)[-window:]))
        slowest, ratio = straggler(seconds)
        record = replace(record.with_values({"perf/straggler_ratio": ratio}), rank_seconds=tuple(seconds))
        if ratio < self.ratio or seconds[slowest] - statistics.median_low(seconds) < _NOTICEABLE_SECONDS:
            return record
        return replace(record, slow=f"rank {slowest} (host {self.hosts[slowest]}) {ratio:.1f}x the median")


def straggler(seconds: Sequence[float]) -> tuple[int, float]:
    """The slowest rank, and its seconds divided by the median of all ranks; of two ranks, by the faster one."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    median = statistics.median_low(seconds)
    return slowest, seconds[slowest] / median if median else 1.0
