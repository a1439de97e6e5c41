"""Makes batches ahead of the step that needs them, in a thread."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Event, Thread
from typing import TypeVar

Given = TypeVar("Given")
Ready = TypeVar("Ready")
_SECONDS = 10.0
"""How long closing waits for the thread; one that is blocked, as in reading, ends with the process."""


@dataclass(frozen=True)
class _Item:
    """What the thread hands over: a value, an error, or the end where it has neither."""

    values: tuple[object, ...] = ()
    error: BaseException | None = None


@contextmanager
def prefetched(items: Iterable[Given], prepare: Callable[[Given], Ready]) -> Iterator[Iterator[Ready]]:
    """An iterator over `prepare` of each item, in the same order.

    A thread makes them: one is ready and one is being made while the reader works. An error is raised where its item
    would come, so what was read before does not depend on it. The thread ends when the context closes.
    """
    ready: Queue[_Item] = Queue(maxsize=1)
    is_closed = Event()
    thread = Thread(target=_fill, args=(ready, items, prepare, is_closed), name="prefetch", daemon=True)
    thread.start()
    try:
        yield _read(ready)
    finally:
        is_closed.set()
        until = time.monotonic() + _SECONDS
        while thread.is_alive() and time.monotonic() < until:
            # The thread may be waiting for room.
            with suppress(Empty):
                ready.get(timeout=0.05)


def _fill(ready: Queue[_Item], items: Iterable[Given], prepare: Callable[[Given], Ready], is_closed: Event) -> None:
    try:
        for item in items:
            ready.put(_Item((prepare(item),)))
            if is_closed.is_set():
                break
        ready.put(_Item())
    except BaseException as error:  # noqa: BLE001 - the reader raises it
        ready.put(_Item(error=error))


def _read(ready: Queue[_Item]) -> Iterator[Ready]:
    while True:
        item = ready.get()
        if item.error is not None:
            raise item.error
        if not item.values:
            return
        yield item.values[0]  # type: ignore[misc]
