"""DeepSpeed's ZeRO optimizers with their state on the host: gradients go there without waits of the host.

DeepSpeed 0.19.8 waits for the norm and the flag of overflow of every parameter. Where gradients of several forwards are
added up, at stages 1 and 2, it also waits for every copy of every parameter.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ds_finetune.foreign.guard import Foreign, replaced

_NORM = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:1914-1954, stage3.py:1975-2003")
_OVERFLOW = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:1791-1797")
_COPIES = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:1110-1128, 1728-1738, 1810-1858")
_NORM_NAME = "complete_grad_norm_calculation_for_cpu_offload"

GroupNorm = Callable[[Any, Sequence[torch.Tensor], Sequence[Any]], torch.Tensor]
"""The norm, on the device, of an optimizer's group: of these tensors, those of its parameters."""


def gather_offloads_without_waits(optimizer: Any, norm: GroupNorm, *, needs_overflow: bool) -> bool:  # noqa: ANN401
    """Let an offloaded `optimizer` compute the norms of groups on the device by `norm`, and copy gradients to pinned
    memory without waiting; returns whether it is offloaded. `needs_overflow` keeps its flag of overflow.

    The step waits once for all copies (stage_1_and_2.py:3018), or at stage 3 for the norm, which follows them.
    """
    is_partitioned = hasattr(optimizer, "_get_norm_groups")
    if not _NORM.attribute(optimizer, "offload_optimizer" if is_partitioned else "cpu_offload"):
        return False
    for name in (_NORM_NAME, "norm_for_param_grads", "get_param_id"):
        _NORM.attribute(optimizer, name)
    setattr(optimizer, _NORM_NAME, lambda params: _norm_of_copied(optimizer, params, norm))
    if is_partitioned:
        return True
    if not needs_overflow:
        _OVERFLOW.attribute(optimizer, "update_offload_overflow_tracker")
        optimizer.update_offload_overflow_tracker = lambda _: None
    if optimizer.cpu_offload_pin_memory:
        for name in ("async_accumulate_grad_in_cpu_via_gpu", "_restore_cpu_offload_grad_to_gpu"):
            copy = _COPIES.attribute(optimizer, name)
            _COPIES.source(copy, "self._wait_for_offload_copies()")
            setattr(optimizer, name, partial(_copy_in_order, optimizer, copy))
    return True


def _norm_of_copied(optimizer: Any, params: Sequence[Any], norm: GroupNorm) -> torch.Tensor:  # noqa: ANN401
    """The norm of a group whose gradients were copied, from the norms of this rank's parts of each."""
    known = optimizer.norm_for_param_grads
    found = [(known.get(optimizer.get_param_id(param)), param) for param in params]
    copied = [(part, param) for part, param in found if part is not None]
    is_complete = len(copied) == len(params) or getattr(optimizer, "ignore_unused_parameters", True)
    assert is_complete, "a trained parameter has no gradient"
    return norm(optimizer, [part for part, _ in copied], [param for _, param in copied] or params)


def _copy_in_order(optimizer: Any, copy: Callable[[Any], None], param: Any) -> None:  # noqa: ANN401
    """Let the device, not the host, wait for earlier copies to pinned memory before it reads from there."""
    with replaced(optimizer, "_wait_for_offload_copies", partial(_order_after_copies, optimizer)):
        copy(param)


def _order_after_copies(optimizer: Any) -> None:  # noqa: ANN401
    from deepspeed.accelerator import get_accelerator

    for event in _COPIES.attribute(optimizer, "_pending_offload_events").values():
        get_accelerator().current_stream().wait_event(event)
