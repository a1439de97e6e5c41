"""Signals that ask a run to save and end: SIGTERM of launchers and clusters, SIGUSR1 that Slurm can send some time
before it ends a job.
"""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from ds_finetune.engine.collectives import all_reduce_max

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_ECHO_SECONDS = 2.0
"""A scheduler signals every process of a job, and launchers forward it: within this time it is the same signal."""


class StopSignals:
    """While this is open the first signal is recorded, and a second one ends this process at once.

    A thread receives signals, because Python's handlers do not run while the process waits in a collective. Without
    `can_save` signals keep their usual effect.
    """

    def __init__(self, *, can_save: bool = True) -> None:
        self.name = ""
        self._can_save = can_save
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if not self._can_save:
            return self
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        threading.Thread(target=self._watch, args=(self._read,), daemon=True).start()
        self._wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _leave_to_thread) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._can_save:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # The thread ends with the pipe.
        os.close(signal.set_wakeup_fd(self._wakeup))

    def is_stop_requested(self) -> bool:
        """Whether any rank was signalled; collective."""
        return self._can_save and all_reduce_max(bool(self.name))[0] > 0

    def _watch(self, pipe: int) -> None:
        while number := os.read(pipe, 1):
            if number[0] in SIGNALS:
                self._take(number[0])
        os.close(pipe)

    def _take(self, number: int) -> None:
        now = time.monotonic()
        if self.name and now - self._since > _ECHO_SECONDS:
            os._exit(128 + number)
        if not self.name:
            self._since, self.name = now, signal.Signals(number).name


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python writes a signal to the pipe only where it has a handler."""
