"""How far a device is with the collectives that were asked of it: NCCL's calls return once they are enqueued.

A mark is put into the device's queue before and after each collective. A mark that is reached says that everything
before it is done, so a rank whose device waits for others is told from one whose device is still busy with its own
work.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ds_finetune.watchdog.collective_call import CollectiveCall


class DeviceMarks(Protocol):
    """Marks in a device's queue."""

    def mark(self) -> Any:  # noqa: ANN401 - an event, of whatever the device has
        """Put a mark behind what is queued now."""

    def is_reached(self, mark: Any) -> bool:  # noqa: ANN401
        """Whether the device has come to `mark`."""

    def seconds(self, begin: Any, end: Any) -> float:  # noqa: ANN401
        """Seconds between two marks that are reached."""

    def is_computing(self) -> bool:
        """Whether the queue of this moment is the one in which the model computes."""


class CudaMarks:
    """CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        """An event with a time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """Without waiting."""
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """CUDA gives milliseconds."""
        return begin.elapsed_time(end) / 1000

    def is_computing(self) -> bool:
        """Collectives on side streams, as of DeepSpeed's `overlap_comm`, run beside the computation."""
        return torch.cuda.current_stream() == torch.cuda.default_stream()


@dataclass(frozen=True)
class DevicePosition:
    """The collective in which the device waits, and those that it has not come to."""

    inside: CollectiveCall | None
    queued: tuple[CollectiveCall, ...]


@dataclass
class _Pending:
    """A collective, or a wait for one, between its marks."""

    call: CollectiveCall
    is_wait: bool
    is_computing: bool
    begin: Any
    end: Any = None


@dataclass
class DeviceProgress:
    """Written by the threads that train, read by the one that watches."""

    clock: DeviceMarks
    _pending: deque[_Pending] = field(default_factory=deque)
    _open: _Pending | None = None
    _waited_seconds: float = 0.0

    def begin(self, call: CollectiveCall, *, is_wait: bool = False) -> None:
        """A collective, or a wait for the last one, is about to be enqueued."""
        self._settle()
        self._open = _Pending(call, is_wait, self.clock.is_computing(), self.clock.mark())
        self._pending.append(self._open)

    def end(self) -> None:
        """It is enqueued."""
        if self._open is not None:
            self._open.end = self.clock.mark()
            self._open = None

    def take_waited(self) -> float:
        """Seconds for which the device's computation has waited in collectives since this was asked before."""
        self._settle()
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def reached(self) -> DevicePosition:
        """How far the device is now."""
        pending = [each for each in tuple(self._pending) if each.end is None or not self.clock.is_reached(each.end)]
        queued = [each for each in pending if not self.clock.is_reached(each.begin)]
        inside = [each.call for each in pending if each not in queued]
        # Of several on different queues, the one that was asked for first.
        return DevicePosition(inside[0] if inside else None, tuple(each.call for each in queued if not each.is_wait))

    def _settle(self) -> None:
        """Forget what the device is done with, in order, and add up how long it took."""
        while self._pending and self._pending[0].end is not None and self.clock.is_reached(self._pending[0].end):
            done = self._pending.popleft()
            if done.is_computing:
                self._waited_seconds += self.clock.seconds(done.begin, done.end)


def device_progress(device: str) -> DeviceProgress | None:
    """For GPUs; None for the CPU, where a collective that has returned is done or is waited for by the program."""
    return DeviceProgress(CudaMarks()) if device == "cuda" else None
