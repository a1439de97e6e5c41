"""Patches of torch.distributed: the default timeout, hooks around collectives, and access to NCCL's flight recorder."""

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
    """Context in which new process groups have the timeout `timeout`, unless another one is passed.

    DeepSpeed passes none (0.19.8, comm/torch.py:539). torch would then use its own default (10 minutes with NCCL, 30
    with gloo), not the timeout of the first group. Device meshes are affected too.
    """
    c10d = dist.distributed_c10d
    _TIMEOUT.parameters(_TIMEOUT.attribute(c10d, "_get_default_timeout"), "backend")
    with replaced(c10d, "_get_default_timeout", lambda backend: timeout):
        yield


def abort_groups() -> None:
    """Abort all process groups. `destroy_process_group` would wait for every started collective of NCCL, which is
    forever if another rank does not take part in it (ProcessGroupNCCL::shutdown).
    """
    _ABORT.attribute(dist.distributed_c10d, "_abort_process_group")()


@contextmanager
def wrapped_group_calls(names: Sequence[str], wrap: Wrap) -> Iterator[None]:
    """Context in which `Work.wait` and the methods `names` of process groups are replaced by `wrap(name, method)`.

    torch has no hook that runs before and after collectives on every backend. But every communication function of
    torch.distributed, `isend` and `irecv` too, calls one of these methods in the end.
    """
    group, work = dist.ProcessGroup, dist.Work
    _GROUP.attribute(group, "allreduce")
    with ExitStack() as stack:
        for name in filter(partial(hasattr, group), names):
            stack.enter_context(replaced(group, name, wrap(name, getattr(group, name))))
        stack.enter_context(replaced(work, "wait", wrap("wait", _GROUP.attribute(work, "wait"))))
        yield


def flight_record() -> bytes:
    """This process's last collectives (2,000 by default) as NCCL's flight recorder has them, for torch's tool
    `torchfrtrace`. Empty if torch is built without NCCL.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return b"" if dump is None else dump()
