"""Tries the steps of a run in a process of its own: `python -m ds_finetune.trainer.trial_process PARENT REQUEST TOKEN`.

REQUEST is a file with a `TrialRequest`. The process joins the other ranks' trial processes, loads the model, does two
steps on the longest rows, and writes a `TrialEnd` after TOKEN to its standard output. It writes no file of the run. It
ends with the process PARENT.
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

import time
import traceback
from dataclasses import replace
from datetime import timedelta
from functools import partial

from ds_finetune.cluster.watchdog.report import is_secondary
from ds_finetune.config.schema import RunConfig
from ds_finetune.console.phase_line import say_nothing
from ds_finetune.console.quiet import quiet_packages
from ds_finetune.engine.device_memory import PeakMemory, is_out_of_memory
from ds_finetune.engine.devices import exchange
from ds_finetune.engine.groups.default_group import PortInUseError, meet, process_group
from ds_finetune.engine.ops.prepare_ops import build_ops, use_cores
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.errors import FinetuneError
from ds_finetune.system.process_messages import decode, send
from ds_finetune.trainer.prepare import prepare_run
from ds_finetune.trainer.trial_messages import DONE, FAILED, OUT_OF_MEMORY, TrialEnd, TrialRequest
from ds_finetune.trainer.trial_rows import trial_batches
from ds_finetune.world import World

_STEPS = 2
"""An optimizer may make its moments in its first step, so that forwards first meet them in the second."""
_STDOUT = 1


def run_trial(request: TrialRequest) -> TrialEnd:
    """Do the steps of `request`, and return how they ended."""
    try:
        return _train(RunConfig.model_validate(request.config), request.world)
    except FinetuneError as error:
        is_port_in_use = isinstance(error, PortInUseError)
        return TrialEnd(FAILED, error=str(error), is_secondary=is_secondary(error), is_port_in_use=is_port_in_use)
    except Exception as error:  # noqa: BLE001 - the end of the process, which its parent reports
        if is_out_of_memory(error):
            return TrialEnd(OUT_OF_MEMORY, error=str(error))
        text = "".join(traceback.format_exception(error)[-3:])
        return TrialEnd(FAILED, error=text, is_secondary=is_secondary(error))


def _train(config: RunConfig, world: World) -> TrialEnd:
    world.set_environment(os.environ)
    run = prepare_run(config, world)
    timeout = timedelta(seconds=run.plan.collective_seconds)
    store = meet(world)
    agree = partial(exchange, store, world, "operators", timeout=timeout)
    run = replace(run, plan=build_ops(use_cores(run.plan, os.environ), agree, say_nothing))
    with process_group(world, run.plan.device, store, timeout=timeout):
        peak = PeakMemory(run.plan.device)
        with start_engine(run.plan, run.inputs.model) as engine:
            for batch in trial_batches(run, steps=_STEPS):
                began = time.monotonic()
                engine.step(batch, lr=0.0)
                seconds = time.monotonic() - began
        return TrialEnd(DONE, peak_bytes=peak.num_bytes(), step_seconds=seconds)


def main() -> None:
    """Run the trial of the request file and write its end."""
    quiet_packages()
    request = decode(Path(sys.argv[2]).read_bytes(), [TrialRequest], peer="the run")
    send(_STDOUT, run_trial(request), token=sys.argv[3])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
