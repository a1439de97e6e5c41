"""Queue the records of a log whose disk is full, so that training continues."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from ds_finetune.console.phase_line import Say

T = TypeVar("T")
Record = tuple[int, Mapping[str, float]]
"""A step and its finite values by name."""
MAX_WAITING = 10_000
"""Maximum number of queued lines; older ones are lost."""
_LONGEST_PAUSE = 16


def one_line(failed: Exception) -> str:
    """The reason of an exception: the first line of its text."""
    text = (getattr(failed, "strerror", None) or str(failed)).strip()
    return text.splitlines()[0][:300] if text else type(failed).__name__


class Outage(Generic[T]):
    """Passes records to `write` in order. A record that raises OSError is queued with those after it and retried later.

    At most `most` records wait, by default `MAX_WAITING`. `say` prints a line when writing fails, when it works again,
    and at the end for what is lost.
    """

    def __init__(self, name: str, write: Callable[[T], None], say: Say, *, most: int | None = None) -> None:
        self._name, self._write, self._say = name, write, say
        self._most = MAX_WAITING if most is None else most
        self._waiting: deque[T] = deque()
        self._lost = 0
        self._pause = self._until_next = 0

    def put(self, record: T) -> None:
        """Write the record and those that wait, or let it wait."""
        self._waiting.append(record)
        if len(self._waiting) > self._most:
            self._waiting.popleft()
            self._lost += 1
        self._until_next -= 1
        if self._until_next <= 0:
            self._try()

    def close(self) -> None:
        """Try a last time, and report what could not be written."""
        if self._waiting:
            self._try()
        if self._waiting:
            self._lost += len(self._waiting)
            self._say(f"{self._name} LACKS {self._lost} RECORDS, which could not be written")

    def _try(self) -> None:
        waited = len(self._waiting) - 1
        try:
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as full:
            if not self._pause:
                self._say(f"{self._name} CANNOT BE WRITTEN: {one_line(full)}; training continues, and its records wait")
            self._pause = min(max(2 * self._pause, 1), _LONGEST_PAUSE)
            self._until_next = self._pause
            return
        if self._pause:
            lost = f"; {self._lost} were lost before, because at most {self._most} wait" if self._lost else ""
            self._say(f"{self._name} is written again, with {waited} records that had waited{lost}")
        self._pause = 0
