"""Lines for a person that hold up nobody: a stopped pager or a closed terminal is no reason to end a run."""

import os
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_LAST_SECONDS = 5.0


class Screen:
    """Prints with `show` in a thread of its own while in `with`; once that fails, nothing more is printed."""

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
                # A pipe whose reader is gone; rich ends the program there (14.1, console.py, on_broken_pipe), and
                # Python's own last flush
                # would make another exit code.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                return
