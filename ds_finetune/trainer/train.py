"""Trains one run, from its configuration to its report. Read this module first."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path

from ds_finetune.cluster.watchdog.monitor import Monitor, start_monitor
from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.config.schedule import seconds_of
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.engine.devices import device_of_rank
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.groups.default_group import JoinedRanks, meet, process_group
from ds_finetune.engine.ops.deepspeed_ops import build_ops, use_cores
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.errors import RunError
from ds_finetune.export.verify.verify import SignalInterruption, VerificationResult
from ds_finetune.observers.checkpointing import Checkpointing
from ds_finetune.observers.outside import load_observers
from ds_finetune.observers.record import Observer, StepRecord
from ds_finetune.observers.stopping import StopSignals
from ds_finetune.observers.trackers import check_trackers
from ds_finetune.plan.name_patterns import patterns_of
from ds_finetune.runs.status import RunStatus
from ds_finetune.system.world import World, check_deepspeed_hostfile
from ds_finetune.trainer.batches import batches_ahead
from ds_finetune.trainer.exports import Exports, verify_run_exports, write_formats
from ds_finetune.trainer.forecast import explain_out_of_memory, forecast_lines, trace_utilisation
from ds_finetune.trainer.loop import run_steps, training_steps
from ds_finetune.trainer.micro_batch import decide_micro_batch, decide_recomputation
from ds_finetune.trainer.observers import StartedRun, make_observers
from ds_finetune.trainer.prepare import (
    PreparedRun,
    check_same_kernels,
    check_same_precision,
    check_same_versions,
    prepare_run,
)
from ds_finetune.trainer.profiling import profiled
from ds_finetune.trainer.reference import complete_reference, find_reference
from ds_finetune.trainer.resolve import ResolvedRun, resolve_here
from ds_finetune.trainer.resume import (
    ResumePoint,
    best_weights_lines,
    find_resume_point,
    resume_engine,
    start_saver,
)
from ds_finetune.trainer.rollouts.source import open_rollouts
from ds_finetune.trainer.rollouts.vllm import check_server
from ds_finetune.trainer.run_dir import check_only_own_files, remove_empty_on_failure
from ds_finetune.trainer.run_records import (
    PAGE,
    Report,
    RunLog,
    StatusKeeper,
    begin_run_folder,
    keep_status,
    record_end,
    report_failure,
)
from ds_finetune.trainer.show import plan_lines, plan_notes


def train(
    config: RunConfig, *, announce: Callable[[PreparedRun], None], say: Say, observers: Sequence[Observer] = ()
) -> Report:
    """Fine-tune by `config`, and return the result. `observers` are added to those of the run file. Rank zero calls
    `announce` when the run is prepared, before the model is built.
    """
    began, log = time.monotonic(), RunLog(say)
    world = World.from_environment(os.environ)
    world.set_environment(os.environ)
    check_deepspeed_hostfile()
    folder = Path(config.output_dir)
    with (
        report_failure(folder, say),
        SignalInterruption(signal.SIGINT) as interruption,
        keep_status(folder, log) as status,
    ):
        with start_watchdog(config.watchdog, world, folder, log.add) as (monitor, ranks):
            if world.rank == 0:
                # Only rank zero's files could replace a user's files; run folders of other nodes have only checkpoints.
                check_only_own_files(Path(config.output_dir), config.inputs(), cache_dir=config.data.cache_dir)
            check_trackers(config.log.trackers)
            outside = [*load_observers(config.log.observers), *observers]
            run = finish_plan(prepare_run(resolve_on_ranks(config, ranks)), ranks, log.say)
            run = replace(run, observers=outside)
            if world.rank == 0:
                check_server(run)
                announce(run)
                log.add("\n".join([*(f"{name}: {text}" for name, text in plan_lines(run)), *plan_notes(run)]))
            with open_process_group(run, ranks, monitor):
                report = _train_and_export(run, ranks, monitor, log, status)
        verdicts: tuple[VerificationResult, ...] = ()
        if world.rank == 0 and config.export.verify and not report.interrupted:
            verdicts = verify_run_exports(folder, report.exports, interruption)
        status.end_without_error(report.interrupted, "" if report.last is None else report.last.stop, verdicts)
    page = report.page
    if world.rank == 0 and (verdicts or not report.was_finished):
        page = record_end(report.output_dir, verdicts, say, is_interrupted=bool(report.interrupted))
    exports = report.exports
    if world.rank == 0 and exports and not any(verdict.problems for verdict in verdicts):
        exports += write_formats(config.export.formats[1:], exports[0], say, keeps_written=report.was_finished)
    return replace(report, exports=exports, seconds=time.monotonic() - began, verdicts=verdicts, page=page)


def _train_and_export(
    run: PreparedRun, ranks: JoinedRanks, monitor: Monitor, log: RunLog, status: StatusKeeper
) -> Report:
    say = log.say if run.plan.world.rank == 0 else say_nothing
    resume_point = find_resume_point(run, say)
    resume_point.check_not_past_end(steps=run.schedule.steps, duration=run.config.train.duration)
    if (finished := finished_before(run, resume_point)) is not None:
        step = resume_point.progress.step
        say(f"the run is finished: {run.output_dir} has its last step, {step}, and its exports")
        return finished
    reference = find_reference(run)
    keeps_start = run.model.objective.reference_is_start
    lacks_reference = any(values is None for values in reference.values())
    loads_weights = resume_point.checkpoint is None or keeps_start or lacks_reference
    engine_context = start_engine(run.plan, run.model, loads_weights=loads_weights)
    # The innermost context reports errors first, since closing the others may wait for ranks that have ended.
    with engine_context as engine, start_saver(run, engine, resume_point) as saver, report_errors(run, monitor):
        if names := engine.random_parameters:
            say(f"randomly initialised from train.seed, since {run.model.path} lacks them: {patterns_of(names)}")
        with monitor.progress.during("reference"):
            run = complete_reference(run, engine, reference)
            if keeps_start:
                engine.keep_as_reference()
        exports = Exports(run, engine, say)
        started = StartedRun(run, engine, resume_point, saver, exports, monitor.progress, ranks.store, say, log.add)
        last, interrupted = train_steps(started, status)
        for line in best_weights_lines(resume_point.checkpoint, run, last) if last and resume_point.checkpoint else ():
            say(line)
        written: tuple[Path, ...] = ()
        if run.config.export.at_end and not interrupted:
            with monitor.progress.during("export"):
                written = (exports.write_last(resume_point.progress.step if last is None else last.step),)
        if saver is not None and saver.last_error:
            raise RunError(
                f"training finished, but its last checkpoint was not written: {saver.last_error}",
                hint="free some space, then start the same command again: it resumes from the previous checkpoint",
            )
    # Where only the export was left to do, the last step is that of the checkpoint.
    return Report(last or resume_point.record, run.output_dir, written, interrupted=interrupted)


def finished_before(run: PreparedRun, point: ResumePoint) -> Report | None:
    """The report of a run that an earlier start has finished; None if steps or the export remain. Collective."""
    last, status = point.record, RunStatus.read(run.output_dir)
    export, page = run.output_dir / "export", run.output_dir / PAGE
    exports = (export,) if export.is_dir() else ()
    is_finished = (
        last is not None
        and (last.step == run.schedule.steps or point.ended_early(patience=run.config.eval.patience))
        and status is not None
        and (status.state, status.step) == ("finished", last.step)
    )
    # Rank zero decides whether the run is finished, since other hosts may have output folders of their own.
    if not all_gather_object(is_finished and bool(exports or not run.config.export.at_end))[0]:
        return None
    if point.lock is not None:
        point.lock.close()
    return Report(last, run.output_dir, exports, page=page if page.is_file() else None, was_finished=True)


def train_steps(started: StartedRun, status: StatusKeeper) -> tuple[StepRecord | None, str]:
    """Take the remaining steps. Returns the last record, and the signal that ended the run, if any. A stop signal takes
    effect after the current step. Outside of steps there is nothing to save, so a signal ends the process.
    """
    run, engine, resume_point = started.run, started.engine, started.resume_point
    stream_position = resume_engine(run, engine, resume_point)
    due = resume_point.interrupted_evaluation(stream_position, steps=run.schedule.steps)
    lacks = begin_run_folder(
        run,
        started.rank_progress,
        status,
        after_step=resume_point.progress.step - len(due),
        last=None if due else resume_point.record,
    )
    if lacks:
        started.say(lacks)
    if resume_point.ended_early(patience=run.config.eval.patience):
        started.say("the run had ended early because eval/loss did not fall; nothing is left to train")
        return None, ""
    with (
        StopSignals(can_save=started.saver is not None, prints=engine.is_rank_zero) as signals,
        open_rollouts(run, engine, started.rank_progress) as rollouts,
    ):
        observers = make_observers(started, signals, rollouts)
        with (
            batches_ahead(run, engine, after=resume_point.progress, stream_position=stream_position)
            if rollouts is None
            else nullcontext(rollouts.batches(resume_point.progress, stream_position)) as batches,
            profiled(training_steps(engine, batches, run.schedule, after=resume_point.progress), started) as records,
        ):
            last = run_steps(chain(due, started.rank_progress.count_steps(records)), observers)
        started.rank_progress.restart_limit("closing")
        lost = None if rollouts is None else rollouts.lost
        saved = save_last(observers, last) if lost else ""
        for observer in observers:
            observer.close()
        if lost is not None:
            raise type(lost)(f"{lost.message}; {saved}", hint=lost.hint)
        return last, last.stop if last and signals.is_stop_requested() else ""


def save_last(observers: Sequence[Observer], last: StepRecord | None) -> str:
    """Save the last step of this start, if there is one. Returns a text that says whether it is saved."""
    saving = next((observer for observer in observers if isinstance(observer, Checkpointing)), None)
    if last is None:
        return "no step was done since the start"
    if saving is None:
        return f"step {last.step} is not saved, since checkpoint.every is never"
    saving.save_last(last)
    return saving.saver.last_error or f"step {last.step} is saved, and the same command resumes from there"


@contextmanager
def start_watchdog(
    watchdog: WatchdogConfig, world: World, output_dir: Path, log: Say
) -> Iterator[tuple[Monitor, JoinedRanks]]:
    """Context that connects all ranks through a store, and monitors them and their collectives. Yields the monitor, and
    the ranks, which wait for each other in exchanges. `log` adds a line to the run's log.
    """
    progress = RankProgress(world.rank, watchdog)
    store = meet(world, timeout=timedelta(seconds=seconds_of(watchdog.meet)))
    with progress.collectives.observe(), start_monitor(progress, world, store, output_dir) as monitor:
        monitor.log = log
        yield monitor, JoinedRanks(world, store, partial(monitor.wait_until_prepared, store))


def resolve_on_ranks(config: RunConfig, ranks: JoinedRanks) -> ResolvedRun:
    """Resolve `config` on this rank, and check that versions, precision and kernels are equal on all ranks. Other ranks
    wait for a rank that downloads the model.
    """
    # A rank with another version may not know that the others wait for it, and a rank may hang here.
    at_once = JoinedRanks(ranks.world, ranks.store)
    check_same_versions(at_once)
    check_same_precision(config.train, at_once)
    resolved = resolve_here(config, ranks.world)
    check_same_kernels(resolved.plan.kernels, resolved.plan.device, ranks)
    return resolved


def finish_plan(run: PreparedRun, ranks: JoinedRanks, say: Say) -> PreparedRun:
    """Make the decisions that all ranks must agree on, then add the forecasts of memory and model FLOPs. Ranks agree on
    `auto` recomputation, on an `auto` micro-batch, and on which operators of the optimizer compile.
    """
    run = compile_operators(decide_micro_batch(decide_recomputation(run, ranks), ranks), ranks, say)
    utilisation = trace_utilisation(run, say if run.plan.world.rank == 0 else say_nothing)
    return replace(run, plan=run.plan.with_lines(*forecast_lines(run)), utilisation=utilisation)


def compile_operators(run: PreparedRun, ranks: JoinedRanks, say: Say) -> PreparedRun:
    """Compile the optimizer's operators. All ranks learn which of them failed. Ranks wait without a limit for a rank
    that takes longer to prepare or compile.
    """
    timeout = timedelta(seconds=run.plan.watchdog.collective_seconds)
    agree = partial(ranks.exchange, "operators", timeout=timeout)
    return replace(run, plan=build_ops(use_cores(run.plan, os.environ), agree, say))


@contextmanager
def open_process_group(run: PreparedRun, ranks: JoinedRanks, monitor: Monitor) -> Iterator[None]:
    """Context with the process group of all ranks. The watchdog reports an error before the group closes."""
    timeout = timedelta(seconds=run.plan.watchdog.collective_seconds)
    group = process_group(ranks.world, run.plan.device, ranks.store, timeout=timeout)
    monitor.progress.collectives.device = device_of_rank(run.plan.device, run.plan.world.local_rank)
    # Until the first step, memory does not depend on the micro-batch size, so a failure is not recorded for that size.
    starting = replace(run, failed_size=None)
    errors = report_errors(starting, monitor)
    with remove_empty_on_failure(run.output_dir), monitor.watch_from_start(ranks.store), group, errors:
        yield


@contextmanager
def report_errors(run: PreparedRun, monitor: Monitor) -> Iterator[None]:
    """Context that reports an error to the other ranks. An out-of-memory error is explained first."""
    with monitor.report_errors(), explain_out_of_memory(run):
        yield
