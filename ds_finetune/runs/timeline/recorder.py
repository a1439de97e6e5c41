"""Records on this rank when each phase of a step and each collective begins and ends, while steps are profiled."""

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from ds_finetune.engine.groups.communication import INPUT_AT, POINT_TO_POINT, bytes_of, input_of
from ds_finetune.engine.phases import EVALUATION, SAMPLING
from ds_finetune.foreign.torch_distributed import wrapped_group_calls
from ds_finetune.runs.timeline.clock import HostClock, Span

DATA, CHECKPOINT = "data", "checkpoint"
_WHOLE_PHASES = (EVALUATION, SAMPLING, CHECKPOINT)
"""Phases inside which no others are told apart: an evaluation and sampling have forwards of their own."""


class Meeting(NamedTuple):
    """What the ranks that take part in a collective call it: the group, its ranks, and how many came before in the
    profiled steps. `ranks` of a message are its sender and its receiver, in this order.
    """

    group: str
    ranks: tuple[int, ...]
    number: int


@dataclass
class Communication:
    """One collective of this rank; times in nanoseconds of this rank's clock, `num_bytes` those of its input."""

    kind: str
    meeting: Meeting
    num_bytes: int
    begin: int
    end: int = 0
    phase: str = ""
    launched: int = 0
    """When the host launched the kernel that runs it, on a GPU."""

    @property
    def span(self) -> Span:
        """From its call to its completion."""
        return self.begin, max(self.end, self.begin)


class PhaseSpan(NamedTuple):
    """A phase from `begin` to `end` in nanoseconds; `depth` is the number of phases around it."""

    name: str
    begin: int
    end: int
    depth: int


class Recorder:
    """Phases, collectives and the times in which this rank's host waits in one; on GPUs kernels tell of collectives."""

    def __init__(self, clock: HostClock) -> None:
        self.clock = clock
        self.phases: list[PhaseSpan] = []
        self.communications: list[Communication] = []
        self.blocked: list[Span] = []
        self._open: list[tuple[str, int]] = []
        self._thread = threading.get_ident()
        self._counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._of_work: weakref.WeakKeyDictionary[dist.Work, Communication] = weakref.WeakKeyDictionary()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record a phase, unless the same one or one that is recorded as a whole is open, or this is another thread."""
        if threading.get_ident() == self._thread and self.open_phase == DATA:
            # The wait for data ends where the step begins.
            self.leave()
        inner = self.open_phase
        if inner in (*_WHOLE_PHASES, phase) or threading.get_ident() != self._thread:
            yield
            return
        self.enter(phase)
        try:
            yield
        finally:
            self.leave()

    def enter(self, phase: str) -> None:
        """Begin a phase, which `leave` ends."""
        self._open.append((phase, self.clock.now()))

    def leave(self) -> None:
        """End the phase that began last."""
        name, began = self._open.pop()
        self.phases.append(PhaseSpan(name, began, self.clock.now(), len(self._open)))

    def leave_all(self) -> None:
        """End the phases that are open."""
        while self._open:
            self.leave()

    @property
    def open_phase(self) -> str:
        """The innermost phase that is open; empty outside."""
        return self._open[-1][0] if self._open else ""

    @contextmanager
    def recording_collectives(self) -> Iterator[None]:
        """While open, record every collective of this process's groups with its bytes, and the waits for them."""

        def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return self._wrap_wait(function) if name == "wait" else self._wrap_collective(name, function)

        with wrapped_group_calls(tuple(INPUT_AT), wrap):
            yield

    def _wrap_collective(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        kind, _ = INPUT_AT[name]

        @functools.wraps(function)
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            meeting = self._next_meeting(group, kind, args)
            made = Communication(kind, meeting, bytes_of(input_of(name, args)), self.clock.now())
            self.communications.append(made)
            try:
                work = function(group, *args, **kwargs)
            finally:
                self.blocked.append((made.begin, self.clock.now()))
            self._follow(work, made)
            return work

        return call

    def _wrap_wait(self, wait: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(wait)
        def call(work: dist.Work, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - a timeout or none
            began = self.clock.now()
            try:
                return wait(work, *args, **kwargs)
            finally:
                ended = self.clock.now()
                self.blocked.append((began, ended))
                awaited = self._of_work.get(work)
                if awaited is not None:
                    awaited.end = awaited.end or ended

        return call

    def _follow(self, work: dist.Work | None, made: Communication) -> None:
        """Note when the collective is complete, also where nobody waits for it yet."""
        if work is None:
            made.end = self.clock.now()
            return
        self._of_work[work] = made
        if made.kind in POINT_TO_POINT:
            return

        def note_end(_: object) -> None:
            made.end = made.end or self.clock.now()

        # Not every backend has futures (torch 2.13, Work.hpp); the wait then tells the end.
        with suppress(RuntimeError):
            work.get_future().add_done_callback(note_end)

    def _next_meeting(self, group: dist.ProcessGroup, kind: str, args: Sequence[Any]) -> Meeting:
        ranks = tuple(dist.get_process_group_ranks(group))
        if kind in POINT_TO_POINT:
            other, mine = ranks[args[1]], ranks[group.rank()]
            ranks = (mine, other) if kind == "send" else (other, mine)
        key = (group.group_name, ranks)
        self._counts[key] += 1
        return Meeting(*key, self._counts[key])
