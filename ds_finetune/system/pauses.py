"""Recognises that this process was paused: stopped by SIGSTOP, frozen with its container, suspended with its machine.

A pause is no hang, so the time limits of a process do not include it.
"""

import resource
import time
from dataclasses import dataclass

_LEAST_SECONDS = 4.0
_SWITCHES_PER_SECOND = 20
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""On Linux it includes the time in which the machine was suspended; `time.monotonic` does not."""


@dataclass(frozen=True)
class Pause:
    """A time in which a thread did not run. Deadlines on the clock `time.monotonic` move by `monotonic_seconds`.

    `is_of_process` is false where the thread only waited, for example for Python's lock, which native code held.
    """

    seconds: float
    monotonic_seconds: float
    is_of_process: bool


class PauseDetector:
    """Detects pauses of one thread, which calls `last_pause` at least every second."""

    def __init__(self) -> None:
        self._looked_at, self._switches = _now(), _num_switches()

    def last_pause(self) -> Pause | None:
        """The pause since the previous call; None where there was none."""
        (before, before_monotonic), (now, monotonic) = self._looked_at, _now()
        switches, self._switches = self._switches, _num_switches()
        self._looked_at = now, monotonic
        seconds = now - before
        if seconds < _LEAST_SECONDS:
            return None
        # A thread that waits for Python's lock asks for it every 5 ms (Python 3.11, Python/ceval_gil.h, take_gil), and
        # the kernel counts each of these waits. A thread of a paused process does nothing.
        waited = self._switches - switches > _SWITCHES_PER_SECOND * seconds
        return Pause(seconds, monotonic - before_monotonic, is_of_process=not waited)


def _now() -> tuple[float, float]:
    return time.clock_gettime(_CLOCK), time.monotonic()


def _num_switches() -> int:
    """How often this thread (outside Linux: this process) has waited so far."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
