"""Counts what a rank sends in each optimizer step and, where collectives block the host, the time that they take."""

import functools
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ds_finetune.config.units import MIB
from ds_finetune.engine.groups.collective_calls import BARRIER, INPUT_AT, POINT_TO_POINT, sent_bytes
from ds_finetune.foreign.torch_distributed import wrapped_group_calls

SEND_RECEIVE, TOTAL = "send_recv", "total"


@dataclass(frozen=True)
class StepCommunication:
    """What this rank's collectives were since the count began, by kind: bytes it sent, and seconds it spent in them.

    `seconds` is None where collectives run on a device: calls return once they are enqueued, so their time is not that
    of the collective.
    """

    num_bytes: Mapping[str, int]
    seconds: Mapping[str, float] | None

    def metrics(self, *, step_seconds: float) -> dict[str, float]:
        """Values of each kind and of all together for a step that took `step_seconds`."""
        values = {f"comm/{kind}_mib": number / MIB for kind, number in _with_total(self.num_bytes)}
        if self.seconds is not None:
            values |= {f"comm/{kind}_share": seconds / step_seconds for kind, seconds in _with_total(self.seconds)}
        return values


def _with_total(by_kind: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(TOTAL, sum(by_kind.values())), *by_kind.items()]


class CommunicationMeter:
    """Bytes and seconds of this process's collectives, by kind; sends and receives are one kind.

    With `is_blocking`, a collective is done when its call or the wait for it returns, and so has a time. That time
    holds the wait for the ranks that come later. Two collectives under way together are both waited for, so the host's
    time is counted once.
    """

    def __init__(self, *, is_blocking: bool) -> None:
        self._is_blocking = is_blocking
        self._bytes: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._kind_of_work: weakref.WeakKeyDictionary[dist.Work, str] = weakref.WeakKeyDictionary()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """While open, count the collectives of this process."""
        with wrapped_group_calls(tuple(INPUT_AT), self._wrap):
            yield

    def restart(self) -> None:
        """Begin again from zero."""
        self._bytes.clear()
        self._seconds.clear()

    def counted(self) -> StepCommunication:
        """What was counted since `restart`."""
        return StepCommunication(dict(self._bytes), dict(self._seconds) if self._is_blocking else None)

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name == "wait":
            return self._wrap_wait(function) if self._is_blocking else function
        return self._wrap_call(name, function)

    def _wrap_call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        kind, _ = INPUT_AT[name]
        counted_as = SEND_RECEIVE if kind in POINT_TO_POINT else kind

        @functools.wraps(function)
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if kind != BARRIER:
                self._bytes[counted_as] += round(sent_bytes(name, args, size=group.size(), group_rank=group.rank()))
            if not self._is_blocking:
                return function(group, *args, **kwargs)
            began = time.perf_counter()
            work = function(group, *args, **kwargs)
            self._seconds[counted_as] += time.perf_counter() - began
            if work is not None:
                self._kind_of_work[work] = counted_as
            return work

        return call

    def _wrap_wait(self, wait: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(wait)
        def call(work: dist.Work, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - a timeout or none
            began = time.perf_counter()
            try:
                return wait(work, *args, **kwargs)
            finally:
                kind = self._kind_of_work.get(work)
                if kind is not None:
                    self._seconds[kind] += time.perf_counter() - began

        return call
