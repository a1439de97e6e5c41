"""The progress of a rank: phase, optimizer step, collectives, and how long the rank may go without progress."""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ds_finetune.config.schedule import seconds_of
from ds_finetune.config.sections import REPORT_SECONDS, WatchdogConfig
from ds_finetune.engine.groups.collective_log import CollectiveLog, CollectiveStatus
from ds_finetune.observers.record import StepRecord

STEP_FACTOR, LEAST_SECONDS, RECENT_STEPS = 10, 60.0, 25
"""`watchdog.limit: auto` is STEP_FACTOR times the median of the last RECENT_STEPS steps, at least LEAST_SECONDS."""
RUNNING, HUNG, FAILING, DONE = "running", "hung", "failing", "done"
PREPARING = "preparation"
"""Name of the phase in which a rank prepares data; it has no time limit."""


@dataclass(frozen=True)
class RankStatus(CollectiveStatus):
    """The status of a rank: its collectives, its phase and step, and the seconds since its last progress."""

    phase: str = PREPARING
    step: int = 0
    seconds: float = 0.0
    state: str = RUNNING
    """RUNNING, HUNG (over its time limit), FAILING (with an error that another rank may have caused) or DONE."""
    number: int = 0
    """Number of the heartbeat that carried this status."""
    trouble: str = ""
    """Text that says why the rank is HUNG or FAILING."""
    late_seconds: float = 0.0
    """Longest round trip of the last 60 heartbeats if many of these were late, else 0."""

    def __str__(self) -> str:
        steps = f"{self.phase}, {self.step:,} steps done, no progress for {self.seconds:.0f} s"
        return f"{super().__str__()}; {steps}"


class RankProgress:
    """Records the progress of this rank. Training threads write it, and threads of the watchdog read it."""

    def __init__(self, rank: int, config: WatchdogConfig) -> None:
        self.rank, self._config = rank, config
        self.phase, self.step = PREPARING, 0
        self.collectives = CollectiveLog()
        self.own_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        """Seconds of each recent step, except the first, minus the time in collectives."""
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._progress_at = time.monotonic()

    def count_steps(self, steps: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """Yield the records of `steps`. Each step counts as progress, and its duration changes the limit `auto`."""
        self.collectives.take_waited()
        for record in steps:
            seconds, waited = record.values["perf/step_seconds"], self.collectives.take_waited()
            self._step_seconds.append(seconds)
            if self.phase == "step":
                self.own_seconds.append(max(seconds - waited, 0.0))
            self.step = record.step
            self.restart_limit("step")
            yield record
            self.collectives.take_waited()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set the phase of this rank, such as evaluation, saving or export, while the context is open."""
        before = self.phase
        self.restart_limit(phase)
        try:
            yield
        finally:
            self.restart_limit(before)

    def restart_limit(self, phase: str = "") -> None:
        """Record progress: the time without progress starts again at zero. The phase becomes `phase` if it is given."""
        self._progress_at, self.phase = time.monotonic(), phase or self.phase

    def exclude_pause(self, seconds: float) -> None:
        """Exclude a pause of this process, which lasted `seconds`, from the time without progress."""
        now = time.monotonic()
        self._progress_at = min(self._progress_at + seconds, now)
        self.collectives.changed_at = min(self.collectives.changed_at + seconds, now)

    def limit_seconds(self) -> float:
        """Seconds without progress after which this rank counts as hung in its current phase."""
        if self.phase == PREPARING or self._config.limit == "never":
            return math.inf
        if self.phase != "step":
            return seconds_of(self._config.start if self.phase == "start" else self._config.other)
        if self._config.limit != "auto":
            return seconds_of(self._config.limit)
        limit = max(LEAST_SECONDS, STEP_FACTOR * statistics.median(self._step_seconds))
        # Below torch's timeout, so that a hang is reported before torch aborts the collective.
        return min(limit, self._config.collective_seconds - REPORT_SECONDS)

    def last_progress_at(self) -> float:
        """Monotonic time of the last progress: a step, a change of phase or, in phases such as evaluation and export, a
        collective. Collectives of a save only ask whether the save is done, and are no progress.
        """
        if self.phase in ("step", "save", "closing"):
            return self._progress_at
        return max(self._progress_at, self.collectives.changed_at)

    def status(self) -> RankStatus:
        """The current status of this rank. Collectives that its device has not reached are not counted as entered."""
        seconds, status = time.monotonic() - self.last_progress_at(), self.collectives.status()
        return RankStatus(**vars(status), phase=self.phase, step=self.step, seconds=seconds)
