"""A thread that writes lines, so that a slow disk or a stopped pager does not block the caller."""

import queue
import threading
from collections.abc import Callable

_LAST_LINES_SECONDS = 5.0


class LineThread:
    """Calls `write` with each line in order, until `write` returns False. The first `put` starts the thread."""

    def __init__(self, write: Callable[..., bool]) -> None:
        self._write, self._lines = write, queue.SimpleQueue[tuple[str, ...] | None]()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def put(self, *line: str) -> None:
        """Queue a line."""
        if self._thread.ident is None:
            self._thread.start()
        self._lines.put(line)

    def close(self) -> None:
        """Wait until all queued lines are written, for some seconds at most."""
        if self._thread.ident is not None:
            self._lines.put(None)
            self._thread.join(_LAST_LINES_SECONDS)

    def _work(self) -> None:
        while (line := self._lines.get()) is not None and self._write(*line):
            pass
