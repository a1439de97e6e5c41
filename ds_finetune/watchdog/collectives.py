"""Collectives are seen by standing in for the functions of torch.distributed that are called."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.patches.torch_distributed import wrapped_collectives
from ds_finetune.watchdog.progress import RankProgress

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
_BETWEEN_TWO = ("send", "recv", "batch_isend_irecv")
"""Seen, and not counted against other ranks. `isend` and `irecv` alone are left as they are: `P2POp` compares them
by identity (torch 2.13, distributed_c10d.py).
"""
_GIVEN = ("input", "input_tensor", "tensor", "input_list", "input_tensor_list", "tensors")
"""What a rank gives, by the parameter's name; objects have no size."""
POINT_TO_POINT = "pairs"


@contextmanager
def observe_collectives(progress: RankProgress) -> Iterator[None]:
    """While it is open, `progress` learns of every collective of this process that goes through torch.distributed.

    Open it before `deepspeed.init_distributed`. Functions that torch.distributed calls itself are not counted twice.
    """

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name == "wait":
            return _observed_wait(progress, function)
        return _observed(progress, name, function, pair=name in _BETWEEN_TWO)

    with wrapped_collectives((*_COLLECTIVES, *_BETWEEN_TWO), wrap):
        yield


def _observed(progress: RankProgress, name: str, function: Callable[..., Any], *, pair: bool) -> Callable[..., Any]:
    parameters = list(inspect.signature(function).parameters)
    given = next(((word, parameters.index(word)) for word in _GIVEN if word in parameters), None)
    grouped = parameters.index("group") if "group" in parameters else len(parameters)
    names: dict[int, str] = {}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the function takes
        group = args[grouped] if len(args) > grouped else kwargs.get("group")
        value = None
        if given is not None:
            value = args[given[1]] if len(args) > given[1] else kwargs.get(given[0])
        ranks = (
            POINT_TO_POINT
            if pair
            else "all"
            if group is None
            else names.get(id(group)) or names.setdefault(id(group), _name(group))
        )
        began = progress.enter(name, _size(value), ranks)
        try:
            return function(*args, **kwargs)
        finally:
            progress.leave(began)

    return call


def _size(value: Any) -> int:  # noqa: ANN401 - a tensor, several, or none
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(torch.numel, value)) if isinstance(value, list) else 0


def _name(group: dist.ProcessGroup) -> str:
    """Ranks of a group, the same on each of them; a copy of the group of all ranks is that to a reader."""
    if not isinstance(group, dist.ProcessGroup):
        return "no rank"
    ranks = dist.get_process_group_ranks(group)
    return "all" if len(ranks) == dist.get_world_size() else "ranks " + ",".join(map(str, ranks))


def _observed_wait(progress: RankProgress, wait: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(wait)
    def call(self: dist.Work, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - a timeout or none
        began = progress.wait()
        try:
            return wait(self, *args, **kwargs)
        finally:
            progress.leave(began)

    return call
