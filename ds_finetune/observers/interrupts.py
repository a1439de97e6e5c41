"""Signals that ask a run to save and end: SIGTERM of launchers and clusters, SIGUSR1 that Slurm can send some time before."""

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

from ds_finetune.engine.processes import largest

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_ECHO_SECONDS = 2.0
"""A scheduler signals every process of a job and the launcher passes it on: within this time it is the same signal."""


class Interrupts:
    """While it is open the first signal is remembered, and a second one ends this process at once.

    Without `can_save` signals do what they always do.
    """

    def __init__(self, *, can_save: bool = True) -> None:
        self.name = ""
        self._can_save = can_save
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._take) for number in SIGNALS} if self._can_save else {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_asked(self) -> bool:
        """Whether any rank was signalled; collective."""
        return self._can_save and largest(bool(self.name))[0] > 0

    def _take(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.name and now - self._since > _ECHO_SECONDS:
            os._exit(128 + number)
        if not self.name:
            self.name, self._since = signal.Signals(number).name, now
