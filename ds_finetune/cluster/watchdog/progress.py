"""The status of a rank: phase, optimizer step, last collectives, and how long the rank may go without progress.

Recording adds microseconds to each collective. NCCL calls return as soon as they are enqueued. Therefore, on a GPU,
events in the device's queue before and after each collective tell whether the device waits in it or still computes.
"""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ds_finetune.config.schedule import seconds_of
from ds_finetune.config.sections import REPORT_SECONDS, WatchdogConfig
from ds_finetune.observers.record import StepRecord
from ds_finetune.system.gpu_threads import use_device

STEP_FACTOR, LEAST_SECONDS, RECENT_STEPS = 10, 60.0, 25
"""The limit `auto` is STEP_FACTOR times the median of the last RECENT_STEPS steps, at least LEAST_SECONDS."""
_RECENT_CALLS = 128
PREPARING = "preparation"
"""The phase without a limit: its time depends on the data, and no rank waits in a collective."""


class CollectiveCall(NamedTuple):
    """A call of the collective `name` with `size` elements as input (0: objects, or no input).

    `ranks` are the ranks of its group. `number` counts the calls in this group, from 1.
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
        """What must be equal on all ranks of the group: name and size."""
        return self.name, self.size


class HostMarks:
    """Marks in time for a CPU, where a collective is done once its call, or the wait for it, returns."""

    def mark(self) -> float:
        """The current monotonic time."""
        return time.monotonic()

    def is_reached(self, mark: float) -> bool:
        """Always true: a mark on a CPU is reached when it is made."""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """Seconds between two marks."""
        return end - begin

    def is_computing(self) -> bool:
        """Whether the computation waits for the collective that begins now."""
        return True


@dataclass(frozen=True)
class CudaMarks(HostMarks):
    """Marks in the queue of `device`: CUDA events in the current stream."""

    device: torch.device

    def mark(self) -> Any:  # noqa: ANN401 - a torch.cuda.Event
        """Record an event with timing."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_reached(self, mark: Any) -> bool:  # noqa: ANN401
        """Query the event without waiting; threads of the watchdog call this too."""
        use_device(self.device)
        return mark.query()

    def seconds(self, begin: Any, end: Any) -> float:  # noqa: ANN401
        """Seconds between two events."""
        return begin.elapsed_time(end) / 1000

    def is_computing(self) -> bool:
        """Whether this is the default stream: collectives in others (DeepSpeed's `overlap_comm`) do not delay it."""
        return torch.cuda.current_stream() == torch.cuda.default_stream()


def marks_of(device: str) -> HostMarks:
    """Marks of the CPU, or of a GPU such as `cuda:1`."""
    return HostMarks() if device == "cpu" else CudaMarks(torch.device(device))


@dataclass(eq=False)
class _MarkedCall:
    """A collective, or a wait for one, with its two marks."""

    call: CollectiveCall
    is_wait: bool
    is_computing: bool
    begin: Any
    end: Any = None


@dataclass(frozen=True)
class RankStatus:
    """What a rank is doing: `seconds` since its last progress, and the collective `inside` which it waits.

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
    """The first collective that was enqueued and that the device has not reached."""
    trouble: str = ""
    """Why rank zero must compare the ranks: this rank hangs, or has an error that another rank may have caused."""
    late: tuple[float, ...] = ()
    """Round-trip seconds of heartbeats of the last minute that were late; empty unless they are many."""

    def __str__(self) -> str:
        last = f"the last was {self.last}" if self.last else "it has not been in any"
        where = f"waits in {self.inside}" if self.inside else f"is in no collective; {last}"
        if self.queued and not self.inside:
            where = f"has not reached {self.queued} on its device, where it computes or hangs; {last}"
        return f"{where}; {self.phase}, {self.step:,} steps done, no progress for {self.seconds:.0f} s"


class RankProgress:
    """The progress of this rank: training threads write it, threads of the watchdog read it."""

    def __init__(self, rank: int, config: WatchdogConfig) -> None:
        self.rank, self._config = rank, config
        self.phase, self.step = PREPARING, 0
        self.own_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        """Seconds of each recent step, except the first, minus the time in collectives."""
        self.marks = HostMarks()
        self._pending: deque[_MarkedCall] = deque()
        self._open: _MarkedCall | None = None
        self._waited_seconds = 0.0
        self._last: CollectiveCall | None = None
        self._counts: Counter[str] = Counter()
        self._recent: deque[CollectiveCall] = deque(maxlen=_RECENT_CALLS)
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._progress_at = self._collective_at = time.monotonic()

    def enter(self, name: str, size: int, ranks: str) -> _MarkedCall | None:
        """Record that a collective begins; the result is passed to `leave`."""
        self._counts[ranks] += 1
        self._last = CollectiveCall(name, size, ranks, self._counts[ranks])
        self._recent.append(self._last)
        return self._begin(self._last, is_wait=False)

    def wait(self) -> _MarkedCall | None:
        """Record a wait for an asynchronous collective, until `leave`; a synchronous one waits within its own call."""
        return None if self._open is not None or self._last is None else self._begin(self._last, is_wait=True)

    def leave(self, begun: _MarkedCall | None) -> None:
        """Record that a call has returned: the collective is done or, if asynchronous, enqueued."""
        if begun is not None:
            begun.end, self._open = self.marks.mark(), None
            self._collective_at = time.monotonic()

    def _begin(self, call: CollectiveCall, *, is_wait: bool) -> _MarkedCall:
        self._settle()
        self._open = begun = _MarkedCall(call, is_wait, self.marks.is_computing(), self.marks.mark())
        self._pending.append(begun)
        self._collective_at = time.monotonic()
        return begun

    def _settle(self) -> None:
        """Remove finished collectives in order, and add up the time for which the computation waited."""
        while self._pending and self._is_done(self._pending[0]):
            done = self._pending.popleft()
            if done.is_computing:
                self._waited_seconds += self.marks.seconds(done.begin, done.end)

    def _is_done(self, call: _MarkedCall) -> bool:
        return call.end is not None and self.marks.is_reached(call.end)

    def take_waited(self) -> float:
        """Seconds that the computation has waited in collectives since the last call."""
        self._settle()
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def count_steps(self, steps: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """Yield the records of `steps`; each counts as progress, and its time enters the limit."""
        self.take_waited()
        for record in steps:
            seconds, waited = record.values["perf/step_seconds"], self.take_waited()
            self._step_seconds.append(seconds)
            if self.phase == "step":
                self.own_seconds.append(max(seconds - waited, 0.0))
            self.step, self.phase = record.step, "step"
            self.restart_limit()
            yield record
            self.take_waited()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """While open, set the phase: evaluation, saving or export, which may take longer than a step."""
        before, self.phase = self.phase, phase
        self.restart_limit()
        try:
            yield
        finally:
            self.phase = before
            self.restart_limit()

    def finish_steps(self) -> None:
        """Enter the last phase, in which the limit of other phases applies: no step follows."""
        self.phase = "closing"
        self.restart_limit()

    def restart_limit(self) -> None:
        """Record progress: the time without progress is zero again."""
        self._progress_at = time.monotonic()

    def exclude_pause(self, seconds: float) -> None:
        """Subtract a pause of this process of `seconds` from the time without progress."""
        now = time.monotonic()
        self._progress_at = min(self._progress_at + seconds, now)
        self._collective_at = min(self._collective_at + seconds, now)

    @property
    def longest_step(self) -> float:
        """Upper bound in seconds of the limit `auto`: a hang is reported before torch aborts the collective."""
        return math.inf if self._config.limit == "never" else self._config.collective_seconds - REPORT_SECONDS

    def limit_seconds(self) -> float:
        """Seconds without progress, in the current phase, after which this rank counts as hung."""
        if self.phase == PREPARING or self._config.limit == "never":
            return math.inf
        if self.phase != "step":
            return seconds_of(self._config.start if self.phase == "start" else self._config.other)
        if self._config.limit != "auto":
            return seconds_of(self._config.limit)
        return min(max(LEAST_SECONDS, STEP_FACTOR * statistics.median(self._step_seconds)), self.longest_step)

    def last_progress_at(self) -> float:
        """Time (monotonic) of the last progress: a step or a change of phase, in some phases also a collective.

        Evaluation and export run collectives as they advance, so each collective is progress. A save runs one every few
        milliseconds to ask whether it is done, so its collectives are not.
        """
        if self.phase in ("step", "save", "closing"):
            return self._progress_at
        return max(self._progress_at, self._collective_at)

    def status(self) -> RankStatus:
        """The current status of this rank, without collectives that its device has not reached."""
        inside, queued = self._position()
        unreached = [each.call for each in queued if not each.is_wait]
        recent = tuple(call for call in self._recent if call not in unreached)
        return RankStatus(
            rank=self.rank,
            phase=self.phase,
            step=self.step,
            seconds=time.monotonic() - self.last_progress_at(),
            inside=inside,
            last=recent[-1] if recent else None,
            counts=dict(self._counts) | {call.ranks: call.number - 1 for call in reversed(unreached)},
            recent=recent,
            queued=unreached[0] if unreached else None,
        )

    def _position(self) -> tuple[CollectiveCall | None, list[_MarkedCall]]:
        """The collective in which this rank waits, and the calls that its device has not reached; does not block."""
        try:
            open_calls = [call for call in tuple(self._pending) if not self._is_done(call)]
            queued = [call for call in open_calls if not self.marks.is_reached(call.begin)]
        except RuntimeError:
            # The device has failed; the training thread gets the same error and reports it.
            open_calls, queued = [] if self._open is None else [self._open], []
        # If several queues wait, take the collective that was enqueued first.
        return next((each.call for each in open_calls if each not in queued), None), queued
