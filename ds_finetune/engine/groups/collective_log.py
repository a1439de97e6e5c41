"""Record of this process's collectives: which were called, which its device has reached, and the time spent in them.

NCCL calls return as soon as they are enqueued. Therefore, on a GPU, CUDA events before and after each collective tell
whether the device waits in the collective or still computes.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_finetune.engine.devices import use_device
from ds_finetune.engine.groups.communication import ALL_TO_ALL, INPUT_AT, bytes_of, input_of
from ds_finetune.engine.groups.communication import POINT_TO_POINT as _SEND_RECEIVE
from ds_finetune.foreign.torch_distributed import Span, spans_of_collectives

_NUM_STORED_CALLS = 10
POINT_TO_POINT = "point to point"
"""Name of the group under which sends and receives are counted. Their numbers are not compared between ranks."""


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


@dataclass(frozen=True)
class CollectiveStatus:
    """How far a rank is in its collectives: the one in which it waits (`inside`), and the last one that it entered.

    `counts` maps each group of ranks to the number of its collectives that the rank has entered. `queued` is the first
    enqueued collective that the device has not reached.
    """

    inside: CollectiveCall | None = None
    last: CollectiveCall | None = None
    counts: dict[str, int] = field(default_factory=dict)
    queued: CollectiveCall | None = None

    def __str__(self) -> str:
        last = f"the last was {self.last}" if self.last else "it has not been in any"
        if self.inside:
            return f"waits in {self.inside}"
        if self.queued:
            return f"has not reached {self.queued} on its device, where it computes or hangs; {last}"
        return f"is in no collective; {last}"


@dataclass(eq=False)
class _TimedCall:
    """The time span of a collective, or of a wait for an asynchronous collective. `begin` and `end` are floats on a CPU
    and CUDA events on a GPU.
    """

    call: CollectiveCall
    is_wait: bool
    is_computing: bool
    """Whether the collective delays the computation. In a side stream (`overlap_comm`) it does not."""
    begin: Any
    end: Any = None

    def is_over(self) -> bool:
        return self.end is not None and _is_reached(self.end)


class CollectiveLog:
    """Records the collectives of this process. The training thread writes the record, and other threads read it."""

    def __init__(self) -> None:
        self.device = "cpu"
        self.last_calls: deque[CollectiveCall] = deque(maxlen=_NUM_STORED_CALLS)
        self.changed_at = time.monotonic()
        """Monotonic time at which the training thread last entered or left a collective."""
        self._pending: deque[_TimedCall] = deque()
        self._open: _TimedCall | None = None
        self._waited_seconds = 0.0
        self._counts: Counter[str] = Counter()

    @contextmanager
    def record(self, name: str, size: int, ranks: str) -> Iterator[None]:
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
        self.changed_at = time.monotonic()
        try:
            yield
        finally:
            call.end, self._open = self._event(), None
            self.changed_at = time.monotonic()

    def _event(self) -> Any:  # noqa: ANN401 - a time, or a torch.cuda.Event in the current stream
        if self.device == "cpu":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self) -> None:
        while self._pending and self._pending[0].is_over():
            done = self._pending.popleft()
            if done.is_computing:
                is_time = isinstance(done.begin, float)
                self._waited_seconds += done.end - done.begin if is_time else done.begin.elapsed_time(done.end) / 1000

    def take_waited(self) -> float:
        """Seconds for which the computation has waited in finished collectives since the last call of `take_waited`."""
        self._settle()
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def status(self) -> CollectiveStatus:
        """How far this rank is. Collectives that its device has not reached are not counted as entered."""
        use_device(torch.device(self.device))
        try:
            unfinished = [call for call in tuple(self._pending) if not call.is_over()]
            queued = [call for call in unfinished if not _is_reached(call.begin)]
        except RuntimeError:
            # The device has failed; the training thread gets the same error and reports it.
            unfinished, queued = [] if self._open is None else [self._open], []
        unreached = [each.call for each in queued if not each.is_wait]
        return CollectiveStatus(
            # Several CUDA streams may wait. The collective that was enqueued first is reported.
            inside=next((each.call for each in unfinished if each not in queued), None),
            last=next((call for call in reversed(tuple(self.last_calls)) if call not in unreached), None),
            counts=dict(self._counts) | {call.ranks: call.number - 1 for call in reversed(unreached)},
            queued=unreached[0] if unreached else None,
        )

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Record every collective of this process's groups, and every wait for one, while the context is open."""
        names: dict[int, str] = {}

        def spans_of(group: dist.ProcessGroup, name: str, args: Sequence[Any]) -> tuple[Span, Span]:
            if not (ranks := names.get(id(group)) or _ranks_text(group)):
                return nullcontext, self.waiting
            names[id(group)] = ranks
            kind, _ = INPUT_AT[name]
            ranks = POINT_TO_POINT if kind in _SEND_RECEIVE else ranks
            # Inputs of an all-to-all or a scatter may differ in size between ranks, so size 0 is recorded on each rank.
            size = 0 if kind in (ALL_TO_ALL, "scatter") else bytes_of(input_of(name, args))
            return partial(self.record, kind, size, ranks), self.waiting

        with spans_of_collectives(tuple(INPUT_AT), spans_of, other_waits=self.waiting):
            yield


def _is_reached(event: Any) -> bool:  # noqa: ANN401
    return isinstance(event, float) or event.query()


def _ranks_text(group: dist.ProcessGroup) -> str:
    try:
        ranks = dist.get_process_group_ranks(group)
    except KeyError:
        # This is a fake group, which memory estimates use.
        return ""
    return "all" if len(ranks) == dist.get_world_size() else "ranks " + ",".join(map(str, ranks))
