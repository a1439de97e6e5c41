"""What this rank is doing: phase, optimizer step and last collectives, kept at a microsecond a collective; and how long
it may.
"""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from ds_finetune.config.schema import WatchdogConfig
from ds_finetune.observers.record import StepRecord
from ds_finetune.plan.timeouts import REPORT_SECONDS, collective_seconds
from ds_finetune.schedule import seconds_of
from ds_finetune.watchdog.collective_call import CollectiveCall
from ds_finetune.watchdog.device import DeviceProgress

STEP_FACTOR, LEAST_SECONDS, RECENT_STEPS = 10, 60.0, 25
"""`auto` is this many times the median of so many recent steps, and not less than a minute."""
_RECENT_CALLS = 128
_WITHIN = -1.0
PREPARING = "preparation"
"""The phase without a limit: what it needs depends on the data, and nobody waits in a collective."""


@dataclass(frozen=True)
class HangLimits:
    """Seconds without progress after which a run has come to a stand: of a step (None: from measured steps), at the
    start, elsewhere.
    """

    step: float | None
    start: float
    other: float
    longest_step: float = math.inf
    """Most of a step's limit that follows from measured steps: torch must not abort a collective before."""

    @classmethod
    def of(cls, config: WatchdogConfig) -> Self:
        """As the run file says; infinite where nothing is watched."""
        if config.limit == "never":
            return cls(math.inf, math.inf, math.inf)
        step = None if config.limit == "auto" else seconds_of(config.limit)
        longest = collective_seconds(config) - REPORT_SECONDS
        return cls(step, seconds_of(config.start), seconds_of(config.other), longest)


@dataclass(frozen=True)
class RankStatus:
    """What a rank says of itself when asked; `seconds` since its last progress, `inside` the collective it waits in."""

    rank: int
    phase: str
    step: int
    seconds: float
    inside: CollectiveCall | None
    last: CollectiveCall | None
    counts: dict[str, int]
    recent: tuple[CollectiveCall, ...]
    queued: CollectiveCall | None = None
    """The first collective that the device has not come to, although the program has asked for it."""

    def as_json(self) -> dict[str, Any]:
        """Plain values, of which `parsed` makes the same again."""
        return asdict(self)

    def __str__(self) -> str:
        """For people."""
        last = f"the last was {self.last}" if self.last else "it has not been in any"
        where = f"waits in {self.inside}" if self.inside else f"is in no collective; {last}"
        if self.queued and not self.inside:
            where = f"has not come to {self.queued} on its device, where it computes or hangs; {last}"
        return f"{where}; {self.phase}, {self.step:,} steps done, no progress for {self.seconds:.0f} s"


class RankProgress:
    """Written by the threads that train, read by the one that watches."""

    def __init__(self, rank: int, limits: HangLimits) -> None:
        self.rank = rank
        self.limits = limits
        self.phase = PREPARING
        self.step = 0
        self.waited_seconds = 0.0
        """Seconds spent in collectives so far."""
        self.own_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        """Of each recent step but the first, its time without that in collectives."""
        self.last: CollectiveCall | None = None
        self.device: DeviceProgress | None = None
        """Where collectives are asynchronous, how far the device is."""
        self._inside: CollectiveCall | None = None
        self._counts: Counter[str] = Counter()
        self._recent: deque[CollectiveCall] = deque(maxlen=_RECENT_CALLS)
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._waited_before = 0.0
        self._progress_at = self._sign_at = time.monotonic()

    def enter(self, name: str, size: int, ranks: str) -> float:
        """A collective begins; returns when."""
        self._counts[ranks] += 1
        self.last = self._inside = call = CollectiveCall(name, size, ranks, self._counts[ranks])
        self._recent.append(call)
        if self.device is not None:
            self.device.begin(call)
        self._sign_at = now = time.monotonic()
        return now

    def leave(self, began: float) -> None:
        """It is over, or on its way where it is asynchronous."""
        if began == _WITHIN:
            return
        self._inside = None
        self._sign_at = now = time.monotonic()
        if self.device is None:
            self.waited_seconds += now - began
        else:
            self.device.end()

    def wait(self) -> float:
        """An asynchronous collective is waited for; `leave` ends that too. Others wait inside their own call."""
        if self._inside is not None:
            return _WITHIN
        self._inside = self.last
        if self.device is not None and self.last is not None:
            self.device.begin(self.last, is_wait=True)
        return time.monotonic()

    def count_steps(self, steps: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """The same records; each is progress, and its time is remembered."""
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
        """Evaluation, saving, export: neither is a step, nor as short as one."""
        before, self.phase = self.phase, phase
        self.restart_limit()
        try:
            yield
        finally:
            self.phase = before
            self.restart_limit()

    def finish_steps(self) -> None:
        """No further step: what is left takes its own time."""
        self.phase = "closing"
        self.restart_limit()

    def restart_limit(self) -> None:
        """The limit begins anew."""
        self._progress_at = time.monotonic()

    def limit_seconds(self) -> float:
        """Seconds that the phase may go without progress."""
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
        """Time (monotonic) of the last progress: a step or a change of phase, and where tensors are passed one by one,
        each collective.

        A save asks every few milliseconds whether it is done, so collectives say nothing there.
        """
        return self._progress_at if self.phase in ("step", "save", "closing") else max(self._progress_at, self._sign_at)

    def status(self) -> RankStatus:
        """What this rank is doing now."""
        mine = RankStatus(
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
            return mine
        try:
            return _on_device(mine, self.device)
        except RuntimeError:
            # A device that has failed says nothing any more; the thread that trains meets the same error.
            return mine


def _on_device(asked: RankStatus, device: DeviceProgress) -> RankStatus:
    """The same where collectives that the device has not come to do not count: its rank has only asked for them."""
    reached = device.reached()
    counts = asked.counts | {call.ranks: call.number - 1 for call in reversed(reached.queued)}
    queued = set(reached.queued)
    recent = tuple(call for call in asked.recent if call not in queued)
    return replace(
        asked,
        # A call of the program that blocks although nothing is queued before it waits there itself.
        inside=reached.inside or (None if reached.queued else asked.inside),
        last=recent[-1] if recent else None,
        counts=counts,
        recent=recent,
        queued=reached.queued[0] if reached.queued else None,
    )
