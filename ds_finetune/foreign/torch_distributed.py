"""torch.distributed: its default timeout, hooks around collectives, and NCCL's flight recorder."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ds_finetune.foreign.guard import Foreign, Wrap, replaced

_TIMEOUT = Foreign("torch", "distributed/distributed_c10d.py:836")
_ABORT = Foreign("torch", "distributed/distributed_c10d.py:2460")
_GROUP = Foreign("torch", "_C/_distributed_c10d.pyi:381-640")


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """Context in which every new process group has `timeout` unless its creator passes one.

    DeepSpeed passes none (0.19.8, comm/torch.py:539). torch then takes its own default, not the first group's timeout:
    10 minutes with NCCL, 30 with gloo. Device meshes call the same function.
    """
    c10d = dist.distributed_c10d
    _TIMEOUT.parameters(_TIMEOUT.attribute(c10d, "_get_default_timeout"), "backend")
    with replaced(c10d, "_get_default_timeout", lambda backend: timeout):
        yield


def abort_groups() -> None:
    """Abort all process groups. With NCCL, `destroy_process_group` waits for every collective that was started, forever
    if another rank does not take part in it (ProcessGroupNCCL::shutdown).
    """
    _ABORT.attribute(dist.distributed_c10d, "_abort_process_group")()


@contextmanager
def wrapped_group_calls(names: Sequence[str], wrap: Wrap) -> Iterator[None]:
    """Context in which the methods `names` of process groups, and `Work.wait`, are replaced by `wrap(name, function)`.

    torch has no hook that runs before and after collectives on every backend. Every function of torch.distributed, also
    `isend`, `irecv` and collectives of objects, ends in one of these methods, even by a saved reference.
    """
    group, work = dist.ProcessGroup, dist.Work
    _GROUP.attribute(group, "allreduce")
    with ExitStack() as stack:
        for name in filter(partial(hasattr, group), names):
            stack.enter_context(replaced(group, name, wrap(name, getattr(group, name))))
        stack.enter_context(replaced(work, "wait", wrap("wait", _GROUP.attribute(work, "wait"))))
        yield


def flight_record() -> bytes:
    """The last collectives of this process (2,000 by default) from NCCL's flight recorder, in the format of
    `torchfrtrace`. Empty if torch is built without NCCL.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return b"" if dump is None else dump()
