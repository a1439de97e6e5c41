"""Estimates the remaining time of a run: steps, evaluations, saves, and the export and its verification at the end."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
EVALUATION, ANSWERS, SAVE, EXPORT = "evaluation", "answers", "save", "export"
_RECENT_STEPS = 50
_BYTES_PER_SECOND = 200e6
"""Assumed speed of an export before one is measured, and of its verification; cautious, for slow disks."""
_LOADING_SECONDS = 15.0
"""The fresh process that verifies imports torch and transformers first."""


class TimeLeft:
    """Sums the remaining work by measured times, and by estimates before the first measurement.

    `every` is the number of steps between evaluations and between saves (0: only at the last step), for those that
    the run has. Until the first evaluation one counts as `evaluation_steps` steps. `export_bytes` is the size of all
    exported folders, 0 where there are none; `verifies` says whether they are verified.
    """

    def __init__(
        self,
        steps: int,
        every: Mapping[str, int],
        *,
        evaluation_steps: float = 0.0,
        export_bytes: float = 0.0,
        verifies: bool = False,
    ) -> None:
        self._steps, self._every = steps, every
        self._evaluation_steps, self._export_bytes, self._verifies = evaluation_steps, export_bytes, verifies
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._measured: dict[str, list[float]] = {}

    def count_step(self, seconds: float) -> None:
        """Record the duration of a step."""
        self._step_seconds.append(seconds)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Measure the time of the code in this context."""
        began = time.monotonic()
        yield
        self._measured.setdefault(phase, []).append(time.monotonic() - began)

    def measure(self, phase: str, function: Callable[P, R]) -> Callable[P, R]:
        """The same function, whose calls are measured."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.during(phase):
                return function(*args, **kwargs)

        return call

    def seconds(self, step: int) -> float:
        """From the end of `step` to the end of the run."""
        step_seconds = _mean(self._step_seconds)
        left = (self._steps - step) * step_seconds
        for phase, every in self._every.items():
            left += _times(after=step, steps=self._steps, every=every) * self._seconds_of(phase, step_seconds)
        return left + self._end_seconds()

    def _seconds_of(self, phase: str, step_seconds: float) -> float:
        if phase not in self._measured:
            return self._evaluation_steps * step_seconds if phase == EVALUATION else 0.0
        # Some evaluations are followed by an export of the best weights: their time is shared out over all evaluations.
        exports = sum(self._measured.get(EXPORT, [])) / len(self._measured[phase]) if phase == EVALUATION else 0.0
        return _mean(self._measured[phase]) + exports

    def _end_seconds(self) -> float:
        if not self._export_bytes:
            return 0.0
        moved = self._export_bytes / _BYTES_PER_SECOND
        export = _mean(self._measured[EXPORT]) if EXPORT in self._measured else moved
        return export + (moved + _LOADING_SECONDS if self._verifies else 0.0)


def _times(*, after: int, steps: int, every: int) -> int:
    """How often, after step `after`, an event still happens that comes every `every` steps and at the last one."""
    if after >= steps:
        return 0
    return steps // every - after // every + bool(steps % every) if every else 1


def _mean(seconds: "deque[float] | list[float]") -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0
