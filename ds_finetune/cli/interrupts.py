"""Lets Ctrl-C end the process at once while packages are imported, which takes seconds and needs no cleaning up."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPT_EXIT_CODE = 128 + signal.SIGINT
"""Exit code of a command that Ctrl-C ended, as shells use it. (A run that saves after Ctrl-C exits with 3.)"""


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Context manager in which Ctrl-C ends the process and prints one line.

    Otherwise KeyboardInterrupt would print a traceback of the imports, or an imported package would catch it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPT_EXIT_CODE)
