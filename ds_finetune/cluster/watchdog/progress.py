"""What a rank is doing: its phase, optimizer step and last collectives, and how long it may go without progress.

Recording adds about a microsecond to each collective. NCCL's calls return as soon as they are enqueued. On a GPU, marks
in the device's queue before and after each collective therefore tell whether the device waits in it or still computes.
"""

import math
import socket
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch

from ds_finetune.config.schedule import seconds_of
from ds_finetune.config.sections import REPORT_SECONDS, WatchdogConfig
from ds_finetune.engine.groups.collectives import all_gather_object, all_gather_scalar
from ds_finetune.observers.record import Observer, StepRecord
from ds_finetune.system.gpu_threads import use_device
from ds_finetune.system.process_messages import ProcessMessage

STEP_FACTOR, LEAST_SECONDS, RECENT_STEPS = 10, 60.0, 25
"""The limit `auto` is STEP_FACTOR times the median of the last RECENT_STEPS steps, and not less than LEAST_SECONDS."""
_RECENT_CALLS = 128
_INSIDE_COLLECTIVE = -1.0
PREPARING = "preparation"
"""The phase that has no limit: its time depends on the data, and no rank waits in a collective."""
_NOTICEABLE_SECONDS = 0.05
"""Smaller differences between ranks are noise, which small models show."""
_LEAST_STEPS = 5
"""A median needs this many steps: a rank that pauses in a single step is not slow."""


class CollectiveCall(NamedTuple):
    """A call of the function `name` with `size` elements as input (0: objects, or no input).

    `ranks` are the ranks that take part. `number` counts the calls among these ranks, from 1.
    """

    name: str
    size: int
    ranks: str
    number: int

    def __str__(self) -> str:
        size = f" of {self.size:,} elements" if self.size else ""
        return f"{self.name}{size} (number {self.number:,} of {self.ranks})"

    @property
    def signature(self) -> tuple[str, int]:
        """What must be the same on every rank that takes part."""
        return self.name, self.size


@dataclass(frozen=True)
class CudaMarks:
    """Marks in the queue of `device`: CUDA events in the current stream."""

    device: torch.device

    def mark(self) -> torch.cuda.Event:
        """Record an event with a time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """Query the event, without waiting; the monitor's thread does so too."""
        use_device(self.device)
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """CUDA's elapsed milliseconds in seconds."""
        return begin.elapsed_time(end) / 1000

    def is_computing(self) -> bool:
        """Whether this is the default stream: collectives in others (DeepSpeed's `overlap_comm`) do not hold it up."""
        return torch.cuda.current_stream() == torch.cuda.default_stream()


@dataclass
class _MarkedCall:
    """A collective, or a wait for one, between its marks."""

    call: CollectiveCall
    is_wait: bool
    is_computing: bool
    begin: Any
    end: Any = None


@dataclass
class DeviceProgress:
    """The progress of a device: the training threads write it, and the monitor's thread reads it."""

    marks: CudaMarks
    _pending: deque[_MarkedCall] = field(default_factory=deque)
    _open: _MarkedCall | None = None
    _waited_seconds: float = 0.0

    def begin(self, call: CollectiveCall, *, is_wait: bool = False) -> None:
        """Mark that a collective, or a wait for the last one, is about to be enqueued."""
        self._settle()
        self._open = _MarkedCall(call, is_wait, self.marks.is_computing(), self.marks.mark())
        self._pending.append(self._open)

    def end(self) -> None:
        """Mark that the collective of the last `begin` is enqueued."""
        if self._open is not None:
            self._open.end = self.marks.mark()
            self._open = None

    def take_waited(self) -> float:
        """Seconds that the device's computation has waited in collectives since this was last called."""
        self._settle()
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def position(self) -> tuple[CollectiveCall | None, tuple[CollectiveCall, ...]]:
        """The collective in which the device waits, and the queued ones that it has not reached; does not wait."""
        pending = [each for each in tuple(self._pending) if each.end is None or not self.marks.is_reached(each.end)]
        queued = [each for each in pending if not self.marks.is_reached(each.begin)]
        inside = [each.call for each in pending if each not in queued]
        # Where several queues wait, take the collective that was enqueued first.
        return inside[0] if inside else None, tuple(each.call for each in queued if not each.is_wait)

    def _settle(self) -> None:
        """Drop the collectives that the device has finished, in order, and add up their time."""
        while self._pending and self._pending[0].end is not None and self.marks.is_reached(self._pending[0].end):
            done = self._pending.popleft()
            if done.is_computing:
                self._waited_seconds += self.marks.seconds(done.begin, done.end)


def device_progress(device: str) -> DeviceProgress | None:
    """Progress of a GPU such as `cuda:1`. None for a CPU, where a collective is done once its call or wait returns."""
    return None if device == "cpu" else DeviceProgress(CudaMarks(torch.device(device)))


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
    inside, queued = device.position()
    unreached = set(queued)
    recent = tuple(call for call in on_host.recent if call not in unreached)
    return replace(
        on_host,
        # If nothing is queued, a call that blocks on the host waits in its own collective.
        inside=inside or (None if queued else on_host.inside),
        last=recent[-1] if recent else None,
        counts=on_host.counts | {call.ranks: call.number - 1 for call in reversed(queued)},
        recent=recent,
        queued=queued[0] if queued else None,
    )


@dataclass
class Stragglers(Observer):
    """Every `every` steps, adds `perf/straggler_ratio`: the step time of the slowest rank over the median of all ranks.

    A rank's step time is the median over its last `every` steps, at least five, without the time in collectives. With
    that time a step takes equally long on all ranks, because the others wait for the slow one in collectives. The times
    are gathered from all ranks at these steps. `record.slow` names a rank whose ratio is `ratio` or more.
    """

    progress: RankProgress
    every: int
    ratio: float
    hosts: list[str] = field(default_factory=list)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the ratio where it is due; collective at these steps."""
        window = max(self.every, _LEAST_STEPS)
        if record.step % self.every or len(self.progress.own_seconds) < min(window, RECENT_STEPS):
            return record
        self.hosts = self.hosts or all_gather_object(socket.gethostname())
        seconds = all_gather_scalar(statistics.median(list(self.progress.own_seconds)[-window:]))
        slowest, ratio = straggler(seconds)
        record = replace(record.with_values({"perf/straggler_ratio": ratio}), rank_seconds=tuple(seconds))
        if ratio < self.ratio or seconds[slowest] - statistics.median_low(seconds) < _NOTICEABLE_SECONDS:
            return record
        return replace(record, slow=f"rank {slowest} (host {self.hosts[slowest]}) {ratio:.1f}x the median")


def straggler(seconds: Sequence[float]) -> tuple[int, float]:
    """The slowest rank, and the ratio of its seconds to the median of all ranks (of two ranks, to the faster one's)."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    median = statistics.median_low(seconds)
    return slowest, seconds[slowest] / median if median else 1.0
