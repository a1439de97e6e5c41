"""Records what a rank is doing: its phase, optimizer step and last collectives; and limits its time without progress.

Recording adds about a microsecond to each collective.
"""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from ds_finetune.cluster.watchdog.collective_call import CollectiveCall
from ds_finetune.cluster.watchdog.device import DeviceProgress
from ds_finetune.config.schedule import seconds_of
from ds_finetune.config.sections import REPORT_SECONDS, WatchdogConfig
from ds_finetune.observers.record import StepRecord
from ds_finetune.system.process_messages import ProcessMessage

STEP_FACTOR, LEAST_SECONDS, RECENT_STEPS = 10, 60.0, 25
"""The limit `auto` is STEP_FACTOR times the median of the last RECENT_STEPS steps, and not less than LEAST_SECONDS."""
_RECENT_CALLS = 128
_INSIDE_COLLECTIVE = -1.0
PREPARING = "preparation"
"""The phase that has no limit: its time depends on the data, and no rank waits in a collective."""


@dataclass(frozen=True)
class HangLimits:
    """Seconds without progress after which a rank counts as hung, by phase.

    A `step` of None stands for a limit that follows from measured steps (`auto`).
    """

    step: float | None
    start: float
    other: float
    longest_step: float = math.inf
    """The highest limit of `auto`: the watchdog must report a hang before torch aborts the collective."""

    @classmethod
    def of(cls, config: WatchdogConfig) -> Self:
        """The limits of the run file; infinite for `watchdog.limit: never`."""
        if config.limit == "never":
            return cls(math.inf, math.inf, math.inf)
        step = None if config.limit == "auto" else seconds_of(config.limit)
        longest = config.collective_seconds - REPORT_SECONDS
        return cls(step, seconds_of(config.start), seconds_of(config.other), longest)


@dataclass(frozen=True)
class RankStatus(ProcessMessage, kind="status"):
    """What a rank is doing: `seconds` have passed since its last progress, and it waits in the collective `inside`.

    `counts` maps groups of ranks to the number of collectives entered. `recent` are the last collectives.
    """

    rank: int
    phase: str
    step: int
    seconds: float
    inside: CollectiveCall | None
    last: CollectiveCall | None
    counts: dict[str, int]
    recent: tuple[CollectiveCall, ...]
    queued: CollectiveCall | None = None
    """The first collective that the program has enqueued and the device has not yet reached."""
    losses: tuple[str, ...] = ()
    """Addresses to which this rank's packets were lost, with counters."""

    def __str__(self) -> str:
        """For people."""
        last = f"the last was {self.last}" if self.last else "it has not been in any"
        where = f"waits in {self.inside}" if self.inside else f"is in no collective; {last}"
        if self.queued and not self.inside:
            where = f"has not reached {self.queued} on its device, where it computes or hangs; {last}"
        return f"{where}; {self.phase}, {self.step:,} steps done, no progress for {self.seconds:.0f} s"


class RankProgress:
    """The progress of this rank: the training threads write it, and the monitor's thread reads it."""

    def __init__(self, rank: int, limits: HangLimits) -> None:
        self.rank = rank
        self.limits = limits
        self.phase = PREPARING
        self.step = 0
        self.waited_seconds = 0.0
        """Seconds spent in collectives so far."""
        self.own_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        """Seconds of each recent step but the first, without those in collectives."""
        self.last: CollectiveCall | None = None
        self.device: DeviceProgress | None = None
        """Progress of the device, where collectives are asynchronous."""
        self._inside: CollectiveCall | None = None
        self._counts: Counter[str] = Counter()
        self._recent: deque[CollectiveCall] = deque(maxlen=_RECENT_CALLS)
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._waited_before = 0.0
        self._progress_at = self._collective_at = time.monotonic()

    def enter(self, name: str, size: int, ranks: str) -> float:
        """Record that a collective begins; returns the time, for `leave`."""
        self._counts[ranks] += 1
        self.last = self._inside = call = CollectiveCall(name, size, ranks, self._counts[ranks])
        self._recent.append(call)
        if self.device is not None:
            self.device.begin(call)
        self._collective_at = now = time.monotonic()
        return now

    def leave(self, began: float) -> None:
        """Record that the call has returned: the collective is done, or enqueued where it is asynchronous."""
        if began == _INSIDE_COLLECTIVE:
            return
        self._inside = None
        self._collective_at = now = time.monotonic()
        if self.device is None:
            self.waited_seconds += now - began
        else:
            self.device.end()

    def wait(self) -> float:
        """Record a wait for an asynchronous collective, which `leave` ends; synchronous ones wait in their own call."""
        if self._inside is not None:
            return _INSIDE_COLLECTIVE
        self._inside = self.last
        if self.device is not None and self.last is not None:
            self.device.begin(self.last, is_wait=True)
        return time.monotonic()

    def count_steps(self, steps: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """Yield the records of `steps`; each counts as progress, and its time is kept for the limit."""
        self._waited_before = self.waited_seconds
        for record in steps:
            seconds = record.values["perf/step_seconds"]
            self._step_seconds.append(seconds)
            if self.device is not None:
                self.waited_seconds += self.device.take_waited()
            if self.phase == "step":
                self.own_seconds.append(max(seconds - (self.waited_seconds - self._waited_before), 0.0))
            self.step, self.phase = record.step, "step"
            self.restart_limit()
            yield record
            self._waited_before = self.waited_seconds

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set the phase while open: evaluation, saving or export, which may take longer than a step."""
        before, self.phase = self.phase, phase
        self.restart_limit()
        try:
            yield
        finally:
            self.phase = before
            self.restart_limit()

    def finish_steps(self) -> None:
        """Enter the last phase: no step follows, so the limit of other phases applies."""
        self.phase = "closing"
        self.restart_limit()

    def restart_limit(self) -> None:
        """Note progress: the time without progress begins at zero again."""
        self._progress_at = time.monotonic()

    def exclude_pause(self, seconds: float) -> None:
        """Leave the `seconds` for which this process was paused out of the time without progress."""
        now = time.monotonic()
        self._progress_at = min(self._progress_at + seconds, now)
        self._collective_at = min(self._collective_at + seconds, now)

    def limit_seconds(self) -> float:
        """Seconds that the phase may take without progress."""
        if self.phase == PREPARING:
            return math.inf
        if self.phase == "start":
            return self.limits.start
        if self.phase != "step":
            return self.limits.other
        if self.limits.step is not None:
            return self.limits.step
        return min(max(LEAST_SECONDS, STEP_FACTOR * statistics.median(self._step_seconds)), self.limits.longest_step)

    def last_progress_at(self) -> float:
        """Time (monotonic) of the last progress: a step or a change of phase, in some phases also a collective.

        Evaluation and export run collectives as they advance, so each collective is progress. A save runs one every few
        milliseconds to ask whether it is done, so its collectives are not.
        """
        if self.phase in ("step", "save", "closing"):
            return self._progress_at
        return max(self._progress_at, self._collective_at)

    def status(self) -> RankStatus:
        """What this rank is doing now."""
        on_host = RankStatus(
            rank=self.rank,
            phase=self.phase,
            step=self.step,
            seconds=time.monotonic() - self.last_progress_at(),
            inside=self._inside,
            last=self.last,
            counts=dict(self._counts),
            recent=tuple(self._recent),
        )
        if self.device is None:
            return on_host
        try:
            return _on_device(on_host, self.device)
        except RuntimeError:
            # The device has failed; the training thread meets the same error and reports it.
            return on_host


def _on_device(on_host: RankStatus, device: DeviceProgress) -> RankStatus:
    """The status without collectives that are enqueued but not yet reached by the device."""
    position = device.position()
    counts = on_host.counts | {call.ranks: call.number - 1 for call in reversed(position.queued)}
    queued = set(position.queued)
    recent = tuple(call for call in on_host.recent if call not in queued)
    return replace(
        on_host,
        # If nothing is queued, a call that blocks on the host waits in its own collective.
        inside=position.inside or (None if position.queued else on_host.inside),
        last=recent[-1] if recent else None,
        counts=counts,
        recent=recent,
        queued=position.queued[0] if position.queued else None,
    )
