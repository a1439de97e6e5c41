"""The progress of a rank: phase, optimizer step, last collectives, and how long the rank may go without progress.

NCCL calls return as soon as they are enqueued. Therefore, on a GPU, CUDA events before and after each collective tell
whether the device waits in the collective or still computes.
"""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_finetune.config.schedule import seconds_of
from ds_finetune.config.sections import REPORT_SECONDS, WatchdogConfig
from ds_finetune.engine.devices import use_device
from ds_finetune.engine.groups.communication import ALL_TO_ALL, INPUT_AT, bytes_of, input_of
from ds_finetune.engine.groups.communication import POINT_TO_POINT as _SEND_RECEIVE
from ds_finetune.foreign.torch_distributed import Span, spans_of_collectives
from ds_finetune.observers.record import StepRecord

STEP_FACTOR, LEAST_SECONDS, RECENT_STEPS = 10, 60.0, 25
"""Values behind `watchdog.limit: auto`: the limit is STEP_FACTOR times the median time of the last RECENT_STEPS steps,
and at least LEAST_SECONDS.
"""
_NUM_STORED_CALLS = 10
RUNNING, HUNG, FAILING, DONE = "running", "hung", "failing", "done"
POINT_TO_POINT = "point to point"
"""Name of the group under which sends and receives are counted. Their numbers are not compared between ranks."""
PREPARING = "preparation"
"""Name of the phase in which a rank prepares data; it has no time limit."""


class CollectiveCall(NamedTuple):
    """A call of the collective `name` in the group `ranks`, with `size` bytes of input (0: not known).

    `number` counts the calls in that group, from 1.
    """

    name: str
    size: int
    ranks: str
    number: int

    def __str__(self) -> str:
        size = f" of {self.size:,} bytes" if self.size else ""
        return f"{self.name}{size} (number {self.number:,} of {self.ranks})"


@dataclass(eq=False)
class _TimedCall:
    """The time span of a collective, or of a wait for an asynchronous collective. Begin and end are floats on a CPU and
    CUDA events on a GPU.
    """

    call: CollectiveCall
    is_wait: bool
    is_computing: bool
    """Whether the computation waits for the collective; a collective in a side stream (`overlap_comm`) delays
    nothing.
    """
    begin: Any
    end: Any = None


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank. `seconds` have passed since its last progress, and `inside` is the collective in which it
    waits.

    `counts` maps each group of ranks to the number of its collectives that the rank has entered.
    """

    phase: str = PREPARING
    step: int = 0
    seconds: float = 0.0
    inside: CollectiveCall | None = None
    last: CollectiveCall | None = None
    counts: dict[str, int] = field(default_factory=dict)
    queued: CollectiveCall | None = None
    """The first collective that is enqueued but that the device has not reached; None if there is none."""
    state: str = RUNNING
    """RUNNING, HUNG (over its time limit), FAILING (with an error that another rank may have caused) or DONE."""
    number: int = 0
    """Number of the heartbeat that carried this status."""
    trouble: str = ""
    """Text that says why the rank is HUNG or FAILING; empty in other states."""
    late_seconds: float = 0.0
    """Longest round trip of a heartbeat in the last minute if many were late, else 0."""

    def __str__(self) -> str:
        last = f"the last was {self.last}" if self.last else "it has not been in any"
        where = f"waits in {self.inside}" if self.inside else f"is in no collective; {last}"
        if self.queued and not self.inside:
            where = f"has not reached {self.queued} on its device, where it computes or hangs; {last}"
        return f"{where}; {self.phase}, {self.step:,} steps done, no progress for {self.seconds:.0f} s"


class RankProgress:
    """Records the progress of this rank. Training threads write it, and threads of the watchdog read it."""

    def __init__(self, rank: int, config: WatchdogConfig) -> None:
        self.rank, self._config = rank, config
        self.phase, self.step = PREPARING, 0
        self.device = "cpu"
        self.own_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        """Seconds of each recent step, except the first, minus the time in collectives."""
        self.last_calls: deque[CollectiveCall] = deque(maxlen=_NUM_STORED_CALLS)
        self._pending: deque[_TimedCall] = deque()
        self._open: _TimedCall | None = None
        self._waited_seconds = 0.0
        self._counts: Counter[str] = Counter()
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._progress_at = self._collective_at = time.monotonic()

    @contextmanager
    def collective(self, name: str, size: int, ranks: str) -> Iterator[None]:
        """Record the collective that the `with` block calls. On a GPU it ends once the collective is enqueued."""
        self._counts[ranks] += 1
        self.last_calls.append(CollectiveCall(name, size, ranks, self._counts[ranks]))
        with self._timed(is_wait=False):
            yield

    def waiting(self) -> AbstractContextManager[None]:
        """Record that the `with` block waits for an asynchronous collective."""
        return nullcontext() if self._open is not None or not self.last_calls else self._timed(is_wait=True)

    @contextmanager
    def _timed(self, *, is_wait: bool) -> Iterator[None]:
        self._settle()
        is_computing = self.device == "cpu" or torch.cuda.current_stream() == torch.cuda.default_stream()
        self._open = call = _TimedCall(self.last_calls[-1], is_wait, is_computing, self._event())
        self._pending.append(call)
        self._collective_at = time.monotonic()
        try:
            yield
        finally:
            call.end, self._open = self._event(), None
            self._collective_at = time.monotonic()

    def _event(self) -> Any:  # noqa: ANN401 - a time, or a torch.cuda.Event in the current stream
        if self.device == "cpu":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self) -> None:
        while self._pending and self._is_done(self._pending[0]):
            done = self._pending.popleft()
            if done.is_computing:
                is_time = isinstance(done.begin, float)
                self._waited_seconds += done.end - done.begin if is_time else done.begin.elapsed_time(done.end) / 1000

    def _is_done(self, call: _TimedCall) -> bool:
        return call.end is not None and _is_reached(call.end)

    def take_waited(self) -> float:
        """Seconds for which the computation has waited in finished collectives since the last call of `take_waited`."""
        self._settle()
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def count_steps(self, steps: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """Yield the records of `steps`. Each step counts as progress, and its duration changes the limit `auto`."""
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
        """Set the phase of this rank, such as evaluation, saving or export, while the context is open. These phases may
        take longer than a step.
        """
        before, self.phase = self.phase, phase
        self.restart_limit()
        try:
            yield
        finally:
            self.phase = before
            self.restart_limit()

    def finish_steps(self) -> None:
        """Enter the phase after the last step, in which the setting `watchdog.other` is the time limit."""
        self.phase = "closing"
        self.restart_limit()

    def restart_limit(self) -> None:
        """Record progress: the time without progress starts again at zero."""
        self._progress_at = time.monotonic()

    def exclude_pause(self, seconds: float) -> None:
        """Exclude a pause of this process, which lasted `seconds`, from the time without progress."""
        now = time.monotonic()
        self._progress_at = min(self._progress_at + seconds, now)
        self._collective_at = min(self._collective_at + seconds, now)

    @property
    def longest_step(self) -> float:
        """Upper bound in seconds of the automatic time limit. It lies below torch's timeout, so that a hang is reported
        before torch aborts the collective.
        """
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
        """Monotonic time of the last progress: a step, a change of phase or, in some phases, a collective.

        Evaluation and export run collectives as they advance, so each collective is progress. A save runs one every few
        milliseconds to ask whether it is done, so its collectives are not.
        """
        if self.phase in ("step", "save", "closing"):
            return self._progress_at
        return max(self._progress_at, self._collective_at)

    def status(self) -> RankStatus:
        """The current status of this rank. Collectives that its device has not reached are not counted as entered."""
        use_device(torch.device(self.device))
        try:
            unfinished = [call for call in tuple(self._pending) if not self._is_done(call)]
            queued = [call for call in unfinished if not _is_reached(call.begin)]
        except RuntimeError:
            # The device has failed; the training thread gets the same error and reports it.
            unfinished, queued = [] if self._open is None else [self._open], []
        unreached = [each.call for each in queued if not each.is_wait]
        return RankStatus(
            phase=self.phase,
            step=self.step,
            seconds=time.monotonic() - self.last_progress_at(),
            # If several queues wait, take the collective that was enqueued first.
            inside=next((each.call for each in unfinished if each not in queued), None),
            last=next((call for call in reversed(tuple(self.last_calls)) if call not in unreached), None),
            counts=dict(self._counts) | {call.ranks: call.number - 1 for call in reversed(unreached)},
            queued=unreached[0] if unreached else None,
        )


def _is_reached(event: Any) -> bool:  # noqa: ANN401
    return isinstance(event, float) or event.query()


@contextmanager
def observe_collectives(progress: RankProgress) -> Iterator[None]:
    """Record every collective of this process's groups, and every wait for one, while the context is open."""
    names: dict[int, str] = {}

    def spans_of(group: dist.ProcessGroup, name: str, args: Sequence[Any]) -> tuple[Span, Span]:
        if not (ranks := names.get(id(group)) or _ranks_text(group)):
            return nullcontext, progress.waiting
        names[id(group)] = ranks
        kind, _ = INPUT_AT[name]
        ranks = POINT_TO_POINT if kind in _SEND_RECEIVE else ranks
        # Inputs of an all-to-all or a scatter may differ in size between ranks, so size 0 is recorded on every rank.
        size = 0 if kind in (ALL_TO_ALL, "scatter") else bytes_of(input_of(name, args))
        return partial(progress.collective, kind, size, ranks), progress.waiting

    with spans_of_collectives(tuple(INPUT_AT), spans_of, other_waits=progress.waiting):
        yield


def _ranks_text(group: dist.ProcessGroup) -> str:
    """The ranks of a group as text, such as `ranks 0,2` or `all`. The text is empty for a fake group, in which a
    memory estimate is traced.
    """
    try:
        ranks = dist.get_process_group_ranks(group)
    except KeyError:
        return ""
    return "all" if len(ranks) == dist.get_world_size() else "ranks " + ",".join(map(str, ranks))
