"""Starts what the engine needs first: the watchdog, the micro-batch and operators that ranks try, the process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ds_finetune.cluster.watchdog.collectives import observe_collectives
from ds_finetune.cluster.watchdog.device import device_progress
from ds_finetune.cluster.watchdog.monitor import Monitor, start_monitor
from ds_finetune.cluster.watchdog.progress import HangLimits, RankProgress
from ds_finetune.config.schedule import seconds_of
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.console.phase_line import Say
from ds_finetune.engine.devices import exchange
from ds_finetune.engine.groups.default_group import meet, process_group
from ds_finetune.engine.ops.prepare_ops import build_ops, use_cores
from ds_finetune.system.world import World
from ds_finetune.trainer.forecast import forecast_lines
from ds_finetune.trainer.memory_report import explain_out_of_memory
from ds_finetune.trainer.micro_batch import decide_micro_batch
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.run_dir import remove_empty_on_failure


@contextmanager
def start_watchdog(
    watchdog: WatchdogConfig, world: World, output_dir: Path, log: Say
) -> Iterator[tuple[Monitor, dist.Store]]:
    """Monitor every rank and its collectives from the moment the ranks have met; also yields the store they met at.

    `log` adds a line to the log of the run.
    """
    progress = RankProgress(world.rank, HangLimits.of(watchdog))
    store = meet(world, timeout=timedelta(seconds=seconds_of(watchdog.meet)))
    with observe_collectives(progress), start_monitor(progress, world, store, output_dir) as monitor:
        monitor.log = log
        yield monitor, store


def finish_plan(run: PreparedRun, store: dist.Store, monitor: Monitor, say: Say) -> PreparedRun:
    """Decide what all ranks have to try first: the micro-batch where it is `auto`, and the optimizer's operators. The
    forecast of the run is added to its plan.
    """
    run = compile_operators(decide_micro_batch(run, store, monitor, say), store, monitor, say)
    return replace(run, plan=replace(run.plan, decisions=(*run.plan.decisions, *forecast_lines(run))))


def compile_operators(run: PreparedRun, store: dist.Store, monitor: Monitor, say: Say) -> PreparedRun:
    """Compile what the optimizer needs; the ranks agree through `store` on what follows from the results.

    There is no limit on how long the ranks wait for one that prepares or compiles longer than the others.
    """
    timeout = timedelta(seconds=run.plan.collective_seconds)

    def agree(problems: str) -> list[str]:
        monitor.wait_until_prepared(store)
        return exchange(store, run.plan.world, "operators", problems, timeout=timeout)

    return replace(run, plan=build_ops(use_cores(run.plan, os.environ), agree, say))


@contextmanager
def open_process_group(run: PreparedRun, store: dist.Store, monitor: Monitor) -> Iterator[None]:
    """Open the process group of all ranks; the watchdog reports an error before the group closes."""
    timeout = timedelta(seconds=run.plan.collective_seconds)
    group = process_group(run.plan.world, run.plan.device, store, timeout=timeout)
    monitor.progress.device = device_progress(run.plan.device)
    with remove_empty_on_failure(run.output_dir), monitor.detect_hangs(store), group, report_errors(run, monitor):
        yield


@contextmanager
def report_errors(run: PreparedRun, monitor: Monitor) -> Iterator[None]:
    """Report an error inside to the other ranks; one that memory ran out is explained first."""
    with monitor.report_errors(), explain_out_of_memory(run):
        yield
