"""Ends a run before its last step: after a signal, which lets the run save first, or after too many skipped steps.

The signals are SIGINT of Ctrl-C, SIGHUP of a closed terminal, SIGTERM of launchers and clusters, and SIGUSR1, which
Slurm can send some time before it ends a job.
"""

import os
import select
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ds_finetune.console.phase_line import CLEAR_LINE
from ds_finetune.engine.groups.collectives import all_reduce_max
from ds_finetune.errors import RunError
from ds_finetune.observers.record import Remembering, StepRecord
from ds_finetune.system.processes import echo_seconds

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
_STDERR = 2


class StopSignals:
    """Context that records the first signal, so that the run can save. A second signal ends the process at once.

    A thread receives the signals, because Python's handlers do not run while the process waits in a collective. Without
    `can_save`, signals keep their usual effect. Ignored signals, such as SIGHUP under `nohup`, stay ignored. With
    `prints`, each signal is reported on standard error at once.
    """

    def __init__(self, *, can_save: bool = True, prints: bool = False) -> None:
        self.name = ""
        self._can_save, self._prints = can_save, prints
        self._since = 0.0
        self._handled = tuple(number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if not self._can_save:
            return self
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        threading.Thread(target=self._watch, args=(self._read,), daemon=True).start()
        self._wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        # Python writes a signal to the wakeup pipe, which the thread reads, only if the signal has a handler.
        self._before = {number: signal.signal(number, lambda *_: None) for number in self._handled}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._can_save:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # Closing the signal pipe ends the thread that reads signals from the pipe.
        os.close(signal.set_wakeup_fd(self._wakeup))

    def is_stop_requested(self) -> bool:
        """Whether any rank has received a signal; collective."""
        return self._can_save and all_reduce_max(bool(self.name))[0] > 0

    def _watch(self, pipe: int) -> None:
        while number := os.read(pipe, 1):
            if number[0] in self._handled:
                self._take(number[0])
        os.close(pipe)

    def _take(self, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if self.name and now - self._since > echo_seconds(number):
            self._print(f"{name} again: ended without saving")
            os._exit(128 + number)
        if not self.name:
            self._since, self.name = now, name
            self._print(f"{name}: saving a checkpoint at the end of this step; another signal ends the run at once")

    def _print(self, text: str) -> None:
        with suppress(OSError):
            # Printing must not block, since this thread must receive a second signal.
            if self._prints and select.select([], [_STDERR], [], 0)[1]:
                os.write(_STDERR, f"{CLEAR_LINE if os.isatty(_STDERR) else ''}{text}\n".encode())


_SCALE_STEPS = 17
"""After this number of skipped steps in a row, DeepSpeed's fp16 loss scale has fallen from 2**16 to 1. Each skipped
step but the first halves it (0.19.8, fp16/loss_scaler.py:253-268).
"""
_FIRST_STEPS = 100


@dataclass
class SkippedSteps(Remembering):
    """Ends the run with a RunError after `limit` skipped steps in a row, or at the last step if every step was skipped.

    With fp16 more steps in a row may be skipped during the first 100 steps, in which DeepSpeed searches the loss scale.
    """

    saved: ClassVar = ("in_a_row",)
    limit: int
    precision: str
    in_a_row: int = 0

    def after_step(self, record: StepRecord) -> StepRecord:
        """Count the skipped steps in a row, and raise RunError if they are too many."""
        self.in_a_row = self.in_a_row + 1 if record.values["train/skipped"] else 0
        is_unchanged = record.is_last and self.in_a_row > 0 and record.values["train/skipped_steps"] >= record.step
        is_early = self.precision == "fp16" and record.step <= _FIRST_STEPS
        if self.in_a_row >= (max(self.limit, _SCALE_STEPS) if is_early else self.limit) or is_unchanged:
            who = f"all {record.step} steps of the run" if is_unchanged else f"{self.in_a_row} steps in a row"
            raise RunError(
                f"{who} were skipped for a non-finite gradient, the last at step {record.step}: {record.notice}",
                hint="lower optim.lr, use train.precision bf16 or fp32, or look at the data of these steps; "
                "nothing was exported",
            )
        return record
