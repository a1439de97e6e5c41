"""Patches of torch.distributed: the default timeout, hooks around collectives, and access to NCCL's flight recorder."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.foreign.guard import Foreign, replaced

_TIMEOUT = Foreign("torch", "distributed/distributed_c10d.py:836")
_ABORT = Foreign("torch", "distributed/distributed_c10d.py:2460")
_GROUP = Foreign("torch", "_C/_distributed_c10d.pyi:381-640")
_PEER_LOST_WORDS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "TCPStore")


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """Context in which new process groups have the timeout `timeout`, unless another one is passed.

    DeepSpeed passes none (0.19.8, comm/torch.py:539). torch would then use its own default (10 minutes with NCCL, 30
    with gloo), not the timeout of the first group. Groups of device meshes get this timeout too.
    """
    c10d = dist.distributed_c10d
    _TIMEOUT.parameters(_TIMEOUT.attribute(c10d, "_get_default_timeout"), "backend")
    with replaced(c10d, "_get_default_timeout", lambda backend: timeout):
        yield


def abort_groups() -> None:
    """Abort all process groups. `destroy_process_group` would wait for every started collective of NCCL, and for ever
    if another rank does not take part in it (ProcessGroupNCCL::shutdown).
    """
    _ABORT.attribute(dist.distributed_c10d, "_abort_process_group")()


Span = Callable[[], AbstractContextManager[object]]
"""Function that makes a context around the call of a collective, or around the wait for its result."""


@contextmanager
def spans_of_collectives(
    names: Sequence[str],
    spans_of: Callable[[dist.ProcessGroup, str, Sequence[Any]], tuple[Span, Span]],
    other_waits: Span,
) -> Iterator[None]:
    """Context that puts spans around calls of process groups' methods `names`, and around waits for their asynchronous
    results. `spans_of(group, name, arguments)` returns the spans of a call and of the wait for its result. The span
    `other_waits` is put around waits for calls that began before this context.

    torch has no hook that runs before and after collectives on every backend. But every communication function of
    torch.distributed, also `isend` and `irecv`, calls one of these methods in the end.
    """
    waits: weakref.WeakKeyDictionary[dist.Work, Span] = weakref.WeakKeyDictionary()
    group_class, work_class = dist.ProcessGroup, dist.Work
    _GROUP.attribute(group_class, "allreduce")
    wait = _GROUP.attribute(work_class, "wait")

    def spanned(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            span, span_of_wait = spans_of(group, name, args)
            with span():
                work = method(group, *args, **kwargs)
            if work is not None:
                waits[work] = span_of_wait
            return work

        return call

    @wraps(wait)
    def spanned_wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - a timeout or none
        with waits.get(work, other_waits)():
            return wait(work, *args, **kwargs)

    with ExitStack() as stack:
        for name in filter(partial(hasattr, group_class), names):
            stack.enter_context(replaced(group_class, name, spanned(name, getattr(group_class, name))))
        stack.enter_context(replaced(work_class, "wait", spanned_wait))
        yield


def flight_record() -> bytes:
    """This process's last collectives (2,000 by default), as recorded by NCCL's flight recorder for torch's tool
    `torchfrtrace`. Empty if torch is built without NCCL.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return b"" if dump is None else dump()


def is_peer_lost(error: BaseException) -> bool:
    """Whether `error` may come from another rank's exit (torch 2.13: gloo's RuntimeError, NCCL's DistBackendError)."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _PEER_LOST_WORDS)
    )
