"""Ctrl-C while modules are imported, which takes seconds and leaves nothing to clean up."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPT_EXIT_CODE = 128 + signal.SIGINT
"""Exit code of a command that Ctrl-C has ended, as shells have it; a run that was saved ends with code 3."""


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """While this is open Ctrl-C ends the process with one line.

    A KeyboardInterrupt would be a traceback of the interpreter's before there is a program to catch it, and packages
    may catch it while they are imported.
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
