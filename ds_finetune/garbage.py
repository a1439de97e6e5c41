"""Python's search for reference cycles, paused while modules are imported or very many objects are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """While this is open no cycles are searched, and nothing that is alive at its end is ever searched afterwards: for
    processes of this program alone, since a cycle of the user's among them would never be freed.

    Imports make a million objects that live as long as the process. Python looks at all of them a dozen times while
    they are made, a tenth of the CPU time of a start, and again in every full collection of the run. Cycles from before
    are freed first, since they would never be otherwise.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def search_paused() -> Iterator[None]:
    """While this is open no cycles are searched; for bounded work that makes many objects and hardly a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
