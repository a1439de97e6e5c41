"""What calls of a process group are: their kind, their input, and the bytes that a rank sends by them."""

from collections.abc import Sequence
from typing import Any

import torch

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
"""Methods of a process group: the kind of collective, and which argument has this rank's input (received: the tensor
that is filled). Those that only older or newer versions of torch call are here too.
"""
POINT_TO_POINT = (SEND, RECEIVE)


def input_of(name: str, args: Sequence[Any]) -> Any:  # noqa: ANN401 - a tensor, lists of tensors, or none
    """This rank's input of a call of the method `name`; None where it has none."""
    kind, at = INPUT_AT[name]
    return args[at] if len(args) > at and kind != BARRIER else None


def bytes_of(value: Any) -> int:  # noqa: ANN401 - a tensor, lists of tensors to any depth, or none
    """Bytes of the elements of all tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, list | tuple) else 0


def sent_bytes(name: str, args: Sequence[Any], *, size: int, group_rank: int) -> float:
    """Bytes that rank `group_rank` of a group of `size` sends by a call of the method `name`.

    They are those of rings and pairs: of an all-reduce 2 (n - 1) / n of its tensor; of a gather or scatter to or from
    all ranks (n - 1) / n of the whole; of an all-to-all what is for other ranks. A broadcast or a reduction to one rank
    passes along a chain, in which all but one send. What a backend really sends may differ.
    """
    kind, _ = INPUT_AT[name]
    given = input_of(name, args)
    if kind == SEND:
        return bytes_of(given)
    if kind in (RECEIVE, BARRIER):
        return 0
    if kind == "all_gather":
        return bytes_of(given) * (size - 1)
    if kind == ALL_TO_ALL:
        return bytes_of(given) - _kept_bytes(given, args, size, group_rank)
    times = 2 if kind == "all_reduce" else 1
    return times * bytes_of(given) * (size - 1) / size


def _kept_bytes(given: Any, args: Sequence[Any], size: int, group_rank: int) -> float:  # noqa: ANN401
    """What an all-to-all leaves on this rank: of a list of tensors its own, else its share of the rows."""
    if isinstance(given, list | tuple):
        return bytes_of(given[group_rank])
    sent_rows = args[3] if len(args) > 3 else ()
    if not sent_rows:
        return bytes_of(given) / size
    return bytes_of(given) * sent_rows[group_rank] / max(sum(sent_rows), 1)
