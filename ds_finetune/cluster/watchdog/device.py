"""Records how far a device is with its collectives, because NCCL's calls return as soon as they are enqueued.

A mark is put into the device's queue before and after each collective. When the device has reached a mark, everything
before it is done. So one can tell whether a device waits for other ranks in a collective or still computes.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ds_finetune.cluster.watchdog.collective_call import CollectiveCall


class DeviceMarks(Protocol):
    """Marks in a device's queue."""

    def mark(self) -> Any:  # noqa: ANN401 - an event, of whatever the device has
        """Put a mark at the end of the current queue."""

    def is_reached(self, mark: Any) -> bool:  # noqa: ANN401
        """Whether the device has reached `mark`; does not wait."""

    def seconds(self, begin: Any, end: Any) -> float:  # noqa: ANN401
        """Seconds between two marks that are both reached."""

    def is_computing(self) -> bool:
        """Whether the model computes in the current queue."""


class CudaMarks:
    """CUDA events in the current stream."""

    def mark(self) -> torch.cuda.Event:
        """Record an event with a time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """Query the event, without waiting."""
        return mark.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """CUDA's elapsed milliseconds in seconds."""
        return begin.elapsed_time(end) / 1000

    def is_computing(self) -> bool:
        """Whether this is the default stream: collectives in others (DeepSpeed's `overlap_comm`) do not hold it up."""
        return torch.cuda.current_stream() == torch.cuda.default_stream()


@dataclass(frozen=True)
class DevicePosition:
    """The collective in which the device waits, and the queued collectives that it has not reached."""

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
    """The progress of a device: the training threads write it, and the monitor's thread reads it."""

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
        """Mark that the collective of the last `begin` is enqueued."""
        if self._open is not None:
            self._open.end = self.marks.mark()
            self._open = None

    def take_waited(self) -> float:
        """Seconds that the device's computation has waited in collectives since this was last called."""
        self._settle()
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def position(self) -> DevicePosition:
        """The device's current position; does not wait."""
        pending = [each for each in tuple(self._pending) if each.end is None or not self.marks.is_reached(each.end)]
        queued = [each for each in pending if not self.marks.is_reached(each.begin)]
        inside = [each.call for each in pending if each not in queued]
        # Where several queues wait, take the collective that was enqueued first.
        return DevicePosition(inside[0] if inside else None, tuple(each.call for each in queued if not each.is_wait))

    def _settle(self) -> None:
        """Drop the collectives that the device has finished, in order, and add up their time."""
        while self._pending and self._pending[0].end is not None and self.marks.is_reached(self._pending[0].end):
            done = self._pending.popleft()
            if done.is_computing:
                self._waited_seconds += self.marks.seconds(done.begin, done.end)


def device_progress(device: str) -> DeviceProgress | None:
    """Progress of a `cuda` device. None for the CPU, where a collective is done once its call or wait returns."""
    return DeviceProgress(CudaMarks()) if device == "cuda" else None
