"""How far a device is with its collectives, because NCCL's calls return once they are enqueued.

A mark is put into the device's queue before and after each collective. Everything before a mark that is reached is
done. So a rank whose device waits for others differs from one whose device still does its own work.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ds_finetune.watchdog.collective_call import CollectiveCall


class DeviceMarks(Protocol):
    """Marks in a device's queue."""

    def mark(self) -> Any:  # noqa: ANN401 - an event, of whatever the device has
        """Put a mark at the end of the current queue."""

    def is_reached(self, mark: Any) -> bool:  # noqa: ANN401
        """Whether the device has reached `mark`; does not wait."""

    def seconds(self, begin: Any, end: Any) -> float:  # noqa: ANN401
        """Seconds between two marks that are both reached."""

    def is_computing(self) -> bool:
        """Whether the current queue is the one in which the model computes."""


class CudaMarks:
    """CUDA events in the current stream."""

    def mark(self) -> torch.cuda.Event:
        """Record an event that has a time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """Without waiting."""
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds; CUDA returns milliseconds."""
        return begin.elapsed_time(end) / 1000

    def is_computing(self) -> bool:
        """Whether this is the default stream: collectives in others (DeepSpeed's `overlap_comm`) do not hold it up."""
        return torch.cuda.current_stream() == torch.cuda.default_stream()


@dataclass(frozen=True)
class DevicePosition:
    """The collective in which the device waits, and those that it has not reached."""

    inside: CollectiveCall | None
    queued: tuple[CollectiveCall, ...]


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
    """Written by the threads that train, read by the monitor's."""

    marks: DeviceMarks
    _pending: deque[_MarkedCall] = field(default_factory=deque)
    _open: _MarkedCall | None = None
    _waited_seconds: float = 0.0

    def begin(self, call: CollectiveCall, *, is_wait: bool = False) -> None:
        """Mark that a collective, or a wait for the last one, is about to be enqueued."""
        self._settle()
        self._open = _MarkedCall(call, is_wait, self.marks.is_computing(), self.marks.mark())
        self._pending.append(self._open)

    def end(self) -> None:
        """Mark that it is enqueued."""
        if self._open is not None:
            self._open.end = self.marks.mark()
            self._open = None

    def take_waited(self) -> float:
        """Seconds for which the device's computation has waited in collectives since the last call of this."""
        self._settle()
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def position(self) -> DevicePosition:
        """Where the device is now; does not wait."""
        pending = [each for each in tuple(self._pending) if each.end is None or not self.marks.is_reached(each.end)]
        queued = [each for each in pending if not self.marks.is_reached(each.begin)]
        inside = [each.call for each in pending if each not in queued]
        # Of several in different queues, the one that was enqueued first.
        return DevicePosition(inside[0] if inside else None, tuple(each.call for each in queued if not each.is_wait))

    def _settle(self) -> None:
        """Drop what the device has finished, in order, and add up the time it took."""
        while self._pending and self._pending[0].end is not None and self.marks.is_reached(self._pending[0].end):
            done = self._pending.popleft()
            if done.is_computing:
                self._waited_seconds += self.marks.seconds(done.begin, done.end)


def device_progress(device: str) -> DeviceProgress | None:
    """For `cuda`; None for the CPU, where a collective that has returned is done, or the program waits for it."""
    return DeviceProgress(CudaMarks()) if device == "cuda" else None
