"""Tries the steps of a run in a process of its own: `python -m ds_finetune.trainer.trial_process PARENT FOLDER`.

FOLDER has the request of `trial.try_steps`. The process joins the other ranks' trial processes, loads the model, does
two steps on the longest rows, and writes a `TrialEnd` into FOLDER. It writes no file of the run. It ends with the
process PARENT.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # Before the imports, which take seconds: PR_SET_PDEATHSIG of prctl(2).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this one has ended")

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from ds_finetune.cluster.watchdog.messages import is_secondary
from ds_finetune.console.phase_line import say_nothing
from ds_finetune.console.quiet import quiet_packages
from ds_finetune.engine.devices import PeakMemory, exchange, is_out_of_memory
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.ops.deepspeed_ops import build_ops, use_cores
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.errors import FinetuneError
from ds_finetune.system.whole_file import replace_file
from ds_finetune.system.world import World
from ds_finetune.trainer.prepare import PreparedRun, prepare_run
from ds_finetune.trainer.resolve import resolve_here
from ds_finetune.trainer.trial import DONE, END, FAILED, OUT_OF_MEMORY, REQUEST, TrialEnd, trial_batches

_STEPS = 2
"""An optimizer may make its moments in its first step, so that forwards first meet them in the second."""


@contextmanager
def end_on_error(folder: Path) -> Iterator[None]:
    """Report an error inside, and end the process at once: leaving its groups may wait for ranks that are gone."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - this process ends by it, and its parent reports it
        outcome = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        is_told = outcome == OUT_OF_MEMORY or isinstance(error, FinetuneError)
        text = str(error) if is_told else "".join(traceback.format_exception(error)[-3:])
        _end(folder, TrialEnd(outcome, error=text, is_secondary=is_secondary(error)))


def _end(folder: Path, end: TrialEnd) -> None:
    replace_file(folder / END, json.dumps(asdict(end)))
    os._exit(0)


def _peak_of_steps(run: PreparedRun, prefix: str, folder: Path) -> int:
    world, timeout = run.plan.world, timedelta(seconds=run.plan.watchdog.collective_seconds)
    met: dist.Store = dist.HashStore()
    if world.world_size > 1:
        met = dist.TCPStore(
            world.master_addr, world.master_port, is_master=False, wait_for_workers=False, timeout=timeout
        )
    store = dist.PrefixStore(prefix, met)
    agree = partial(exchange, store, world, "operators", timeout=timeout)
    run = replace(run, plan=build_ops(use_cores(run.plan, os.environ), agree, say_nothing))
    with process_group(world, run.plan.device, store, timeout=timeout), end_on_error(folder):
        # On a GPU counted from before the group: its communicator takes memory.
        peak = run.peak if run.plan.device == "cuda" and run.peak is not None else PeakMemory("cpu", world)
        with start_engine(run.plan, run.model) as engine, end_on_error(folder):
            for batch in trial_batches(run, steps=_STEPS):
                engine.step(batch, lr=0.0)
        return peak.num_bytes()


def main() -> None:
    """Run the trial of the request, write how it ended, and end the process."""
    quiet_packages()
    folder = Path(sys.argv[2])
    with end_on_error(folder):
        request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        world = World(**request["world"])
        world.set_environment(os.environ)
        run = prepare_run(resolve_here(request["config"], world))
        peak = _peak_of_steps(run, request["prefix"], folder)
    _end(folder, TrialEnd(DONE, peak))


if __name__ == "__main__":
    main()
