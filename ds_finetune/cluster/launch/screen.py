"""Prints to the terminal without blocking or ending a run when a pager is stopped or the terminal is closed."""

import os
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_LAST_SECONDS = 5.0


class Screen:
    """Prints lines with `show` in a separate thread while in `with`; after a failure it prints nothing more."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._lines = show, queue.SimpleQueue[str | None]()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.put(None)
        self._thread.join(_LAST_SECONDS)

    def say(self, line: str) -> None:
        """Print `line` after those before it."""
        self._lines.put(line)

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._show(line)
            except (OSError, SystemExit):
                # A pipe without a reader: rich ends the program there (14.1, console.py, on_broken_pipe), and Python's
                # flush at exit would change the exit code.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                return
