"""Annotations in traces of torch.profiler. They mark the phases of a step. Each collective is annotated with a key that
is equal on all ranks that take part.
"""

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch.profiler import record_function

from ds_finetune.engine.groups.communication import INPUT_AT, POINT_TO_POINT, bytes_of, input_of
from ds_finetune.foreign.torch_distributed import wrapped_group_calls

DATA, CHECKPOINT, WAIT = "data", "checkpoint", "wait"
SEPARATOR = "|"
"""Separator in the annotation of a collective between its kind, group, number in the group, and input bytes."""


class Annotations:
    """Annotates a profile with the phases of the thread that created this object, and with all threads' collectives."""

    def __init__(self) -> None:
        self._phases: list[str] = []
        self._data: record_function | None = None
        self._thread = threading.get_ident()
        self._counts: Counter[str] = Counter()
        self._names: weakref.WeakKeyDictionary[dist.Work, str] = weakref.WeakKeyDictionary()

    def begin_data(self) -> None:
        """Begin to annotate the wait for data. The annotation ends when the next phase begins."""
        self._data = record_function(DATA)
        self._data.__enter__()

    def end_data(self) -> None:
        """End the annotation of the wait for data, if one is open."""
        if self._data is not None:
            self._data.__exit__(None, None, None)
            self._data = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Annotate the `with` block as a phase. Does nothing inside a block of the same phase, or in another thread."""
        if phase in self._phases or threading.get_ident() != self._thread:
            yield
            return
        self.end_data()
        self._phases.append(phase)
        try:
            with record_function(phase):
                yield
        finally:
            self._phases.pop()

    def on_collectives(self) -> AbstractContextManager[None]:
        """Annotate every collective of this process's groups, and every wait for one, while the context is open."""
        return wrapped_group_calls(
            tuple(INPUT_AT), lambda name, function: self._wait(function) if name == WAIT else self._call(name, function)
        )

    def _call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            annotation = self._name_of(group, name, args)
            with record_function(annotation):
                work = function(group, *args, **kwargs)
            if work is not None:
                self._names[work] = annotation
            return work

        return call

    def _wait(self, function: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(function)
        def call(work: dist.Work, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - a timeout or none
            with record_function(self._names.get(work, WAIT)):
                return function(work, *args, **kwargs)

        return call

    def _name_of(self, group: dist.ProcessGroup, name: str, args: Sequence[Any]) -> str:
        kind, _ = INPUT_AT[name]
        key = str(group.group_name)
        if kind in POINT_TO_POINT:
            ranks = dist.get_process_group_ranks(group)
            ends = ranks[group.rank()], ranks[args[1]]
            # The key names the sender before the receiver, so that both ranks of a message use the same key.
            key = "{} {}>{}".format(key, *(ends if kind == "send" else ends[::-1]))
        self._counts[key] += 1
        return SEPARATOR.join((kind, key, str(self._counts[key]), str(bytes_of(input_of(name, args)))))
