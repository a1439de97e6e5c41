"""Progress line of a long phase such as tokenising, and functions that print text."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Self, TextIO, TypeVar

T = TypeVar("T")
Say = Callable[[str], None]
CLEAR_LINE = "\r\x1b[2K"
_MINUTE, _HOUR = 60, 3600
_LIVE_SECONDS = 0.5
"""Seconds before the first progress line on a terminal, and between two updates of the line."""
_FIRST_SECONDS, _PLAIN_SECONDS = 5.0, 60.0
"""Without a terminal: seconds before the first progress line, and between two progress lines."""


class PhaseLine:
    """Prints the progress of the phase `what` on rank 0's standard error: parts done of `total`, and the time left.

    On a terminal the line is updated in place and removed at the end. Elsewhere a line appears after five seconds, then
    at most once a minute, and at the end of a phase of a minute or more. If `total` is 0, or if more parts are done
    than `total`, the line shows the elapsed time instead of the time left. The first `warmup` parts, in which processes
    start, are not used to estimate the time left. If `is_rank_zero` is given, the environment variable RANK is not
    used.
    """

    def __init__(
        self, what: str, total: int = 0, *, warmup: int = 0, out: TextIO | None = None, is_rank_zero: bool | None = None
    ) -> None:
        self._what, self._total, self._out = what, total, out or sys.stderr
        self._is_live = self._out.isatty()
        self._is_silent = os.environ.get("RANK", "0") != "0" if is_rank_zero is None else not is_rank_zero
        self._done, self._is_shown = 0, False
        self._began = time.monotonic()
        self._warmup, self._measured_from = warmup, (self._began, 0)
        self._next = self._began + (_LIVE_SECONDS if self._is_live else _FIRST_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def advance(self, parts: int = 1) -> None:
        """Count `parts` further parts of the phase as done, and write the progress line if an update is due."""
        self._done += parts
        now = time.monotonic()
        if 0 < self._done <= self._warmup:
            self._measured_from = (now, self._done)
        # The time left cannot be estimated before the first part is done, so no line is written in the first minute.
        is_empty = not self._is_live and self._total and not self._done and now - self._began < _PLAIN_SECONDS
        if self._is_silent or now < self._next or is_empty:
            return
        self._next = now + (_LIVE_SECONDS if self._is_live else _PLAIN_SECONDS)
        self._is_shown = True
        line = f"{self._what}{self._state(now - self._began)}"
        write_now(self._out, CLEAR_LINE + line if self._is_live else line + "\n")

    def before_each(self, check: Callable[[], bool]) -> Callable[[], bool]:
        """Make a function to call before each part. It counts the previous part as done, and returns `check()`."""
        self._done -= 1

        def counted() -> bool:
            self.advance()
            return check()

        return counted

    def close(self) -> None:
        """End the phase: remove its line from a terminal; elsewhere print its duration if that is a minute or more."""
        seconds = time.monotonic() - self._began if self._is_shown else 0.0
        if self._is_shown and self._is_live:
            write_now(self._out, CLEAR_LINE)
        elif seconds >= _PLAIN_SECONDS:
            write_now(self._out, f"{self._what}: {time_text(seconds)}\n")
        self._is_shown = False

    def _state(self, seconds: float) -> str:
        if not self._total or self._done > self._total:
            return f"{f' {self._done:,}' if self._done else ''}  {time_text(seconds)}"
        done = f" {self._done:,}/{self._total:,}"
        since, before = self._measured_from
        if self._done <= 0 or self._done < before + self._warmup:
            return done
        seconds_per_part = (self._began + seconds - since) / (self._done - before)
        return f"{done}  eta {time_text(seconds_per_part * (self._total - self._done))}"


def count_parts(what: str, parts: Iterable[T], total: int) -> Iterator[T]:
    """Yield each item of `parts`, and show a progress line named `what`."""
    with PhaseLine(what, total) as line:
        for part in parts:
            yield part
            line.advance()


def say_nothing(_: str) -> None:
    """Print nothing. Ranks other than zero use this function instead of one that prints."""


def write_now(out: TextIO, text: str) -> None:
    """Write text to `out` and flush it, ignoring errors such as a full disk."""
    with suppress(OSError):
        out.write(text)
        out.flush()


def time_text(seconds: float) -> str:
    """Format seconds as `12 s`, `5 min` or `1.5 h`."""
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < _HOUR else f"{seconds / _HOUR:.1f} h"
