"""Annotations in traces of torch.profiler. They mark the phases of a step. Each collective is annotated with a key that
is equal on all ranks that take part.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.profiler import record_function

from ds_finetune.engine.groups.communication import INPUT_AT, POINT_TO_POINT, bytes_of, input_of
from ds_finetune.foreign.torch_distributed import Span, spans_of_collectives

STEP, OFFLOAD, DATA, CHECKPOINT, WAIT = "step", "offload", "data", "checkpoint", "wait"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
EVALUATION, SAMPLING = "evaluation", "sampling"
COMPUTING = (FORWARD, BACKWARD, OPTIMIZER, EVALUATION, SAMPLING)
"""Phases of a step whose time counts as computation, apart from collectives and copies in them."""
SEPARATOR = "|"
"""Separates the fields of a collective's annotation: kind, group, number in the group, and input bytes."""


class Annotations:
    """Annotates a profile with the phases of the thread that created this object, and with all threads' collectives."""

    def __init__(self) -> None:
        self._phases: list[str] = []
        self._data = ExitStack()
        self._thread = threading.get_ident()
        self._counts: Counter[str] = Counter()

    def begin_data(self) -> None:
        """Begin to annotate the wait for data. The annotation ends when the next phase begins."""
        self._data.enter_context(record_function(DATA))

    def end_data(self) -> None:
        """End the annotation of the wait for data, if one is open."""
        self._data.close()

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
        return spans_of_collectives(tuple(INPUT_AT), self._spans_of, other_waits=partial(record_function, WAIT))

    def _spans_of(self, group: dist.ProcessGroup, name: str, args: Sequence[Any]) -> tuple[Span, Span]:
        kind, _ = INPUT_AT[name]
        key = str(group.group_name)
        if kind in POINT_TO_POINT:
            ranks = dist.get_process_group_ranks(group)
            ends = ranks[group.rank()], ranks[args[1]]
            # The key names the sender before the receiver, so that both ranks of a message use the same key.
            key = "{} {}>{}".format(key, *(ends if kind == "send" else ends[::-1]))
        self._counts[key] += 1
        text = SEPARATOR.join((kind, key, str(self._counts[key]), str(bytes_of(input_of(name, args)))))
        span = partial(record_function, text)
        return span, span
