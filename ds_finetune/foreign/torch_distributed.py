"""torch.distributed: its default timeout, and calls of its collectives."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from ds_finetune.foreign.guard import Foreign, Wrap, replaced

_TIMEOUT = Foreign("torch", "distributed/distributed_c10d.py:836")
_ABORT = Foreign("torch", "distributed/distributed_c10d.py:2460")
_COLLECTIVES = Foreign("torch", "distributed/distributed_c10d.py")
_GROUP = Foreign("torch", "_C/_distributed_c10d.pyi:381-640")


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """While this is open every new process group has `timeout` where its maker passes none.

    DeepSpeed passes none (0.19.8, comm/torch.py:539), and torch then takes its own default and not that of the first
    group: 10 minutes with NCCL, 30 with gloo. Device meshes call the same function.
    """
    c10d = dist.distributed_c10d
    _TIMEOUT.parameters(_TIMEOUT.attribute(c10d, "_get_default_timeout"), "backend")
    with replaced(c10d, "_get_default_timeout", lambda backend: timeout):
        yield


def abort_groups() -> None:
    """End all process groups at once; `destroy_process_group` waits under NCCL for every collective that was started,
    for ever where another rank does not take part in it (ProcessGroupNCCL::shutdown).
    """
    _ABORT.attribute(dist.distributed_c10d, "_abort_process_group")()


@contextmanager
def wrapped_collectives(names: Sequence[str], wrap: Wrap) -> Iterator[None]:
    """While this is open, `wrap(name, function)` replaces the functions `names` of torch.distributed, and `Work.wait`.

    torch offers no hook that is called before a collective starts and after it ends on every backend. DeepSpeed 0.19.8
    looks the functions up when it calls them, two of them when its backend is made (comm/torch.py:248-257), so this
    must be open before `deepspeed.init_distributed`.
    """
    functions = {name: _COLLECTIVES.attribute(dist, name) for name in names}
    wait = _COLLECTIVES.attribute(dist.Work, "wait")
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(replaced(dist, name, wrap(name, function)))
        stack.enter_context(replaced(dist.Work, "wait", wrap("wait", wait)))
        yield


@contextmanager
def wrapped_group_calls(names: Sequence[str], wrap: Wrap) -> Iterator[None]:
    """While this is open, `wrap(name, function)` replaces those methods `names` that process groups have, and
    `Work.wait`.

    Every function of torch.distributed ends in one of these methods, whoever has kept a reference to it, and they get
    the tensors, which `wrapped_collectives` does not always see: `isend` and `irecv`, and collectives of objects.
    """
    group, work = dist.ProcessGroup, dist.Work
    _GROUP.attribute(group, "allreduce")
    with ExitStack() as stack:
        for name in filter(partial(hasattr, group), names):
            stack.enter_context(replaced(group, name, wrap(name, getattr(group, name))))
        stack.enter_context(replaced(work, "wait", wrap("wait", _GROUP.attribute(work, "wait"))))
        yield
