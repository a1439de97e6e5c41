"""Records every collective of a rank, by wrapping functions of torch.distributed while the rank trains."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.foreign.torch_distributed import wrapped_collectives

_COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "_all_gather_base",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)
_SEND_RECEIVE = ("send", "recv", "batch_isend_irecv")
"""Functions that are recorded but not compared with other ranks. `isend` and `irecv` are not wrapped, because `P2POp`
compares them by identity (torch 2.13, distributed_c10d.py).
"""
_INPUT_NAMES = ("input", "input_tensor", "tensor", "input_list", "input_tensor_list", "tensors")
"""Names of the parameter that takes a rank's input tensors; inputs that are objects have no size."""
POINT_TO_POINT = "point to point"
"""The text in place of `ranks` for a send or a receive."""


@contextmanager
def observe_collectives(progress: RankProgress) -> Iterator[None]:
    """While open, let `progress` record every collective that this process calls through torch.distributed.

    Open it before `deepspeed.init_distributed`. Functions that torch.distributed calls itself are not counted twice.
    """

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name == "wait":
            return _wrap_wait(progress, function)
        return _wrap_collective(progress, name, function, is_point_to_point=name in _SEND_RECEIVE)

    with wrapped_collectives((*_COLLECTIVES, *_SEND_RECEIVE), wrap):
        yield


def _wrap_collective(
    progress: RankProgress, name: str, function: Callable[..., Any], *, is_point_to_point: bool
) -> Callable[..., Any]:
    parameters = list(inspect.signature(function).parameters)
    input_at = next(((word, parameters.index(word)) for word in _INPUT_NAMES if word in parameters), None)
    group_at = parameters.index("group") if "group" in parameters else len(parameters)
    names: dict[int, str] = {}

    def ranks_of(group: dist.ProcessGroup | None) -> str:
        if is_point_to_point:
            return POINT_TO_POINT
        if group is None:
            return "all"
        return names.get(id(group)) or names.setdefault(id(group), _ranks_text(group))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the function takes
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        value = None
        if input_at is not None:
            value = args[input_at[1]] if len(args) > input_at[1] else kwargs.get(input_at[0])
        began = progress.enter(name, _num_elements(value), ranks_of(group))
        try:
            return function(*args, **kwargs)
        finally:
            progress.leave(began)

    return call


def _num_elements(value: Any) -> int:  # noqa: ANN401 - a tensor, several, or none
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(torch.numel, value)) if isinstance(value, list) else 0


def _ranks_text(group: dist.ProcessGroup) -> str:
    """The ranks of a group, the same text on each of them; `all` for any group of all ranks."""
    if not isinstance(group, dist.ProcessGroup):
        return "no rank"
    ranks = dist.get_process_group_ranks(group)
    return "all" if len(ranks) == dist.get_world_size() else "ranks " + ",".join(map(str, ranks))


def _wrap_wait(progress: RankProgress, wait: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(wait)
    def call(self: dist.Work, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - a timeout or none
        began = progress.wait()
        try:
            return wait(self, *args, **kwargs)
        finally:
            progress.leave(began)

    return call
