"""Work on files that may never end: a file system that does not answer must not hold up the caller."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WRITE_SECONDS = 3.0
"""How long the end of a run waits for each of its files."""


def try_to_finish(work: Callable[[], object]) -> bool:
    """Do `work` in a thread of its own and wait for it, at most `WRITE_SECONDS`; returns whether it ended.

    Work that has not ended goes on as long as the process lives. It is not begun where there is no memory for a thread.
    """
    thread = threading.Thread(target=work, name="bounded-work", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # CPython 3.11's "can't start new thread".
        return False
    thread.join(WRITE_SECONDS)
    return not thread.is_alive()


def try_to_read(read: Callable[[], T], default: T) -> T:
    """What `read` returns, or `default` where it takes longer than `WRITE_SECONDS`."""
    found: list[T] = []
    try_to_finish(lambda: found.append(read()))
    return found[0] if found else default
