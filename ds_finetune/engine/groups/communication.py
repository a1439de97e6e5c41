"""Measures a rank's collectives in each optimizer step: bytes sent and, if collectives block the host, their time."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.config.units import MIB
from ds_finetune.foreign.torch_distributed import Span, spans_of_collectives

SEND, RECEIVE, BARRIER, ALL_TO_ALL = "send", "recv", "barrier", "all_to_all"
INPUT_AT = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "alltoall": (ALL_TO_ALL, 1),
    "alltoall_base": (ALL_TO_ALL, 1),
    "all_to_all_single": (ALL_TO_ALL, 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "barrier": (BARRIER, 0),
    SEND: (SEND, 0),
    RECEIVE: (RECEIVE, 0),
}
"""For each method of a process group: its kind of collective, and the index of the argument that is this rank's input
(of a receive, the tensor to fill). Some of these methods are called only by other versions of torch.
"""
POINT_TO_POINT = (SEND, RECEIVE)


def input_of(name: str, args: Sequence[Any]) -> Any:  # noqa: ANN401 - a tensor, lists of tensors, or none
    """This rank's input in a call of the process group's method `name`; None if it has no input."""
    kind, at = INPUT_AT[name]
    return args[at] if len(args) > at and kind != BARRIER else None


def bytes_of(value: Any) -> int:  # noqa: ANN401 - a tensor, lists of tensors to any depth, or none
    """Total bytes of all tensors in `value`."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, list | tuple) else 0


def sent_bytes(name: str, args: Sequence[Any], *, size: int, group_rank: int) -> float:
    """Number of bytes that rank `group_rank` of a group of n = `size` ranks sends in a call of the method `name`. It
    assumes ring and pairwise algorithms: 2 (n - 1) / n of the tensor for an all-reduce, (n - 1) / n of the full tensor
    for an all-gather or reduce-scatter, and the rows for other ranks for an all-to-all. A broadcast or reduce passes
    along a chain in which all ranks but one send. What a backend really sends may differ.
    """
    kind, _ = INPUT_AT[name]
    own_input = input_of(name, args)
    if kind == SEND:
        return bytes_of(own_input)
    if kind in (RECEIVE, BARRIER):
        return 0
    if kind == "all_gather":
        return bytes_of(own_input) * (size - 1)
    if kind == ALL_TO_ALL:
        # An all-to-all's input is a list of one tensor per rank, or one tensor whose rows are divided between ranks.
        num_bytes = bytes_of(own_input)
        if isinstance(own_input, list | tuple):
            return num_bytes - bytes_of(own_input[group_rank])
        sent_rows = args[3] if len(args) > 3 and args[3] else [1] * size
        return num_bytes - num_bytes * sent_rows[group_rank] / max(sum(sent_rows), 1)
    times = 2 if kind == "all_reduce" else 1
    return times * bytes_of(own_input) * (size - 1) / size


SEND_RECEIVE, TOTAL = "send_recv", "total"


@dataclass(frozen=True)
class StepCommunication:
    """Bytes sent and seconds spent in this rank's collectives of a step, by kind of collective. `seconds` is None if
    collectives run on a GPU: a call returns once the collective is enqueued, so its duration is unknown.
    """

    num_bytes: Mapping[str, int]
    seconds: Mapping[str, float] | None

    def metrics(self, *, step_seconds: float) -> dict[str, float]:
        """Metrics of a step that took `step_seconds`: MiB and fraction of time, by kind of collective and in total."""
        values = {f"comm/{kind}_mib": number / MIB for kind, number in _with_total(self.num_bytes)}
        if self.seconds is not None:
            values |= {f"comm/{kind}_share": seconds / step_seconds for kind, seconds in _with_total(self.seconds)}
        return values


def _with_total(by_kind: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(TOTAL, sum(by_kind.values())), *by_kind.items()]


class CommunicationMeter:
    """Counts bytes and seconds of this process's collectives by kind. Sends and receives are one kind. Collectives are
    timed only with `is_blocking`: then the call or its `wait` returns at the end of the collective. The time includes
    waiting for slower ranks. The host's time is measured, so overlapping collectives are not counted twice.
    """

    def __init__(self, *, is_blocking: bool) -> None:
        self._is_blocking = is_blocking
        self._bytes: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which the collectives of this process are counted."""
        with spans_of_collectives(tuple(INPUT_AT), self._spans_of, other_waits=nullcontext):
            yield

    def restart(self) -> None:
        """Reset the counted bytes and seconds of collectives to zero."""
        self._bytes.clear()
        self._seconds.clear()

    def counted(self) -> StepCommunication:
        """Bytes and seconds of collectives since `restart`."""
        return StepCommunication(dict(self._bytes), dict(self._seconds) if self._is_blocking else None)

    def _spans_of(self, group: dist.ProcessGroup, name: str, args: Sequence[Any]) -> tuple[Span, Span]:
        kind, _ = INPUT_AT[name]
        counted_as = SEND_RECEIVE if kind in POINT_TO_POINT else kind
        if kind != BARRIER:
            self._bytes[counted_as] += round(sent_bytes(name, args, size=group.size(), group_rank=group.rank()))
        span = partial(self._timed, counted_as) if self._is_blocking else nullcontext
        return span, span

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[kind] += time.perf_counter() - began
