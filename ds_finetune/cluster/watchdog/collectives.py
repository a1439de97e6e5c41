"""Records every collective of a rank, by wrapping the methods of its process groups while the rank trains."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.engine.groups.communication import ALL_TO_ALL, INPUT_AT, input_of
from ds_finetune.engine.groups.communication import POINT_TO_POINT as _SEND_RECEIVE
from ds_finetune.foreign.torch_distributed import wrapped_group_calls

POINT_TO_POINT = "point to point"
"""Value of `ranks` for a send or a receive, which are not compared with other ranks."""
_SIZES_DIFFER = (ALL_TO_ALL, "scatter")
"""Collectives whose input sizes may differ between ranks: their size, which would be compared, is not recorded."""


@contextmanager
def observe_collectives(progress: RankProgress) -> Iterator[None]:
    """While open, let `progress` record every collective of this process's groups and every wait for one."""
    names: dict[int, str] = {}

    def ranks_of(group: dist.ProcessGroup) -> str:
        """Empty for a group that torch does not know: memory traces make such groups, which communicate with nobody."""
        with suppress(KeyError):
            return names.get(id(group)) or names.setdefault(id(group), _ranks_text(group))
        return ""

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return _wrap_wait(progress, function) if name == "wait" else _wrap_call(progress, name, function, ranks_of)

    with wrapped_group_calls(tuple(INPUT_AT), wrap):
        yield


def _wrap_call(
    progress: RankProgress, name: str, function: Callable[..., Any], ranks_of: Callable[[dist.ProcessGroup], str]
) -> Callable[..., Any]:
    kind, _ = INPUT_AT[name]

    @functools.wraps(function)
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the method takes
        ranks = POINT_TO_POINT if kind in _SEND_RECEIVE else ranks_of(group)
        if not ranks:
            return function(group, *args, **kwargs)
        size = 0 if kind in _SIZES_DIFFER else _num_elements(input_of(name, args))
        began = progress.enter(kind, size, ranks)
        try:
            return function(group, *args, **kwargs)
        finally:
            progress.leave(began)

    return call


def _wrap_wait(progress: RankProgress, wait: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(wait)
    def call(work: dist.Work, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - a timeout or none
        began = progress.wait()
        try:
            return wait(work, *args, **kwargs)
        finally:
            progress.leave(began)

    return call


def _num_elements(value: Any) -> int:  # noqa: ANN401 - a tensor, lists of tensors to any depth, or none
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(_num_elements, value)) if isinstance(value, list | tuple) else 0


def _ranks_text(group: dist.ProcessGroup) -> str:
    """The ranks of a group as a text that is the same on all of its ranks; `all` for any group of all ranks."""
    ranks = dist.get_process_group_ranks(group)
    return "all" if len(ranks) == dist.get_world_size() else "ranks " + ",".join(map(str, ranks))
