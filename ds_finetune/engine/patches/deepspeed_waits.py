"""DeepSpeed's optimizers: in a step the host waits for the device once, to read the norm of the gradient.

DeepSpeed 0.19.8 waits for flags of overflow, for constants that it copies to the device for each parameter group, and
for the same norm once more for each group that is clipped. With the state on the host it waits for the norm and the
flag of overflow of every parameter, and, where stages 1 and 2 add up gradients of several forwards, for every copy of
every parameter.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.foreign.guard import Foreign, replaced

_OFFLOADED_NORM = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:1914-1954, stage3.py:1975-2003")
_OFFLOADED_OVERFLOW = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:1791-1797")
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
    if not _OFFLOADED_NORM.attribute(optimizer, "offload_optimizer" if is_partitioned else "cpu_offload"):
        return False
    for name in (_NORM_NAME, "norm_for_param_grads", "get_param_id"):
        _OFFLOADED_NORM.attribute(optimizer, name)
    setattr(optimizer, _NORM_NAME, lambda params: _norm_of_copied(optimizer, params, norm))
    if is_partitioned:
        return True
    if not needs_overflow:
        _OFFLOADED_OVERFLOW.attribute(optimizer, "update_offload_overflow_tracker")
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


_INVALID = Foreign("deepspeed", "runtime/utils.py:231, zero/stage_1_and_2.py:3043, 3203, stage3.py:2888")
_OVERFLOW = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:3029-3044, 3234, stage3.py:2811-2820, 2881-2889")
_HALF = Foreign(
    "deepspeed", "runtime/fp16/unfused_optimizer.py:197-226, fused_optimizer.py:270-330, runtime/utils.py:431, 537"
)
_NORM_1_2 = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:2648-2702")
_NORM_3 = Foreign("deepspeed", "runtime/zero/stage3.py:2419-2486")
_NORM_NUMBERS = 2**18
"""Numbers of a gradient on a CPU that are copied to fp64 at a time, 2 MiB: fresh pages for a copy of the whole cost as
much as the norm."""
_NORM_NUMBERS_OF_GPU = 2**25
"""Numbers of a gradient on a GPU that are copied to fp64 at a time, 256 MiB: at stage 0 in 16 bits one gradient may be
that of all weights, and a copy of it would take twice the memory of their fp32 values."""
_METHODS_OF_STAGE_3 = (
    "_assert_same_partition_group",
    "_get_param_partition_group",
    "_grad_norm_counts_every_rank",
    "_autoep_expert_parallel_group",
)


def has_zero_norms(optimizer: object) -> bool:
    """Whether this is DeepSpeed's plain optimizer of a ZeRO stage; ZenFlow and SuperOffload have steps of their own."""
    return type(optimizer).__name__ in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


class ZeroNorms:
    """The norms of the gradient in the steps of a ZeRO optimizer, each of which the host reads once.

    `has_bad_gradient` says whether a gradient of the step is not finite on any rank. It is known before the step, so
    DeepSpeed's own flag of overflow, which the host would wait for, is not computed; a sum that overflows later makes
    the norm invalid. Muon's momentum would be changed before the norm is known, so there the flag stays.
    """

    def __init__(self, optimizer: Any, has_bad_gradient: Callable[[], bool]) -> None:  # noqa: ANN401 - DeepSpeed's
        self._optimizer = optimizer
        self._read: list[tuple[torch.Tensor, float]] = []
        self._norm, self._scale = math.nan, 1.0
        kind = type(optimizer)
        self._module = sys.modules[kind.__module__]
        for name in ("is_invalid_grad_norm", "combine_grad_norm_groups"):
            _INVALID.attribute(self._module, name)
        self._combine_groups = self._module.combine_grad_norm_groups  # type: ignore[attr-defined]
        if hasattr(optimizer, "_get_norm_groups"):
            # Its methods are wrapped, and have no source.
            for name in ("get_grad_norm_direct", *_METHODS_OF_STAGE_3):
                _NORM_3.attribute(optimizer, name)
            norm: Callable[[Any, Any, Any], torch.Tensor] = _norm_at_stage_3
        else:
            _NORM_1_2.source(kind.get_grad_norm_direct, "mask_nan_or_inf_with_val_inplace(total_norm")
            norm = _norm_at_stages_1_and_2
        optimizer.get_grad_norm_direct = lambda gradients, params: norm(optimizer, gradients, params)
        _OVERFLOW.attribute(optimizer, "has_overflow")
        needs_overflow = "muon" in type(optimizer.optimizer).__name__.lower()
        if not needs_overflow:
            # At stage 3 DeepSpeed's own lets the step wait for the stream of reductions (stage3.py:3026); without it
            # only the host's wait at the end of backward does (stage3.py:1413-1414).
            optimizer.has_overflow = lambda *_, **__: has_bad_gradient()
        self.is_offloaded = gather_offloads_without_waits(optimizer, norm, needs_overflow=needs_overflow)
        name = "_get_norm_groups" if hasattr(optimizer, "_get_norm_groups") else "scaled_global_norm"
        self.unread_norm: Callable[..., Any] = _NORM_1_2.attribute(optimizer, name)
        """The norm of all groups, or a list of those of each at stage 3, on the device."""
        if self.is_offloaded:
            setattr(optimizer, name, lambda *_, **__: _copied_to_host(self.unread_norm()))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Open during a step of the optimizer."""
        self._read.clear()
        self._norm = math.nan
        with (
            replaced(self._module, "is_invalid_grad_norm", self.is_invalid),
            replaced(self._module, "combine_grad_norm_groups", self._combine),
        ):
            yield

    def remember(self, norm: torch.Tensor, value: float) -> None:
        """Take a norm, a scalar, that was read already."""
        self._read.append((norm, value))

    def is_invalid(self, norm: torch.Tensor | float) -> bool:
        """In place of DeepSpeed's function: whether a norm is negative or not finite."""
        value = self._value(norm) if isinstance(norm, torch.Tensor) else float(norm)
        return not math.isfinite(value) or value < 0

    def global_norm(self, norm: torch.Tensor | float) -> float:
        """`_global_grad_norm` of the latest step: the norm that was read, divided by the scale of the loss."""
        if not isinstance(norm, torch.Tensor):
            return float(norm)
        return self._norm / self._scale

    def _value(self, norm: torch.Tensor) -> float:
        found = self._known_value(norm)
        if found is None:
            found = norm.item()
            self.remember(norm, found)
        if math.isnan(self._norm):
            # The first norm that DeepSpeed asks for is that of all groups. Afterwards the scale may change.
            self._norm, self._scale = found, float(self._optimizer.loss_scale)
        return found

    def _known_value(self, norm: torch.Tensor) -> float | None:
        return next((value for known, value in self._read if known is norm), None)

    def _combine(self, norms: Sequence[torch.Tensor], norm_type: float = 2) -> torch.Tensor:
        """In place of DeepSpeed's function: one norm that was read already is that of all groups."""
        if len(norms) == 1 and self._known_value(norms[0]) is not None:
            return norms[0]
        return self._combine_groups(norms, norm_type)


class HalfPrecisionNorms:
    """Lets the optimizers of stage 0 in 16 bits wait for the device once for each norm; with FusedAdam there is one.

    DeepSpeed's own wait for the flag of each parameter, and three times for the norm of each group.
    """

    def __init__(self, optimizer: Any, has_bad_gradient: Callable[[], bool]) -> None:  # noqa: ANN401 - DeepSpeed's
        checker = _HALF.attribute(optimizer, "overflow_checker")
        for name in ("has_overflow", "check"):
            _HALF.attribute(checker, name)
            setattr(checker, name, lambda *_, **__: has_bad_gradient())
        self._module = sys.modules[type(optimizer).__module__]
        _HALF.parameters(_HALF.attribute(self._module, "get_weight_norm"), "parameters", "norm_type", "mpu")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Replace DeepSpeed's functions of norms while this is open, which it is during a step of the optimizer."""
        with replaced(self._module, "get_weight_norm", _norm_of_tensors):
            if not hasattr(self._module, "get_flattened_grad_norm"):
                yield
                return
            with replaced(self._module, "get_flattened_grad_norm", _norm_of_flat_gradients):
                yield

    def global_norm(self, norm: torch.Tensor | float) -> float:
        """`_global_grad_norm` of the latest step."""
        return float(norm)


def _norm_of_tensors(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:  # noqa: ANN401
    """The norm of tensors over the ranks of the model, -1 where it is not finite."""
    from deepspeed.runtime.utils import bwc_tensor_model_parallel_rank, is_model_parallel_parameter

    assert norm_type == 2, norm_type
    is_first = bwc_tensor_model_parallel_rank(mpu=mpu) == 0
    counted = [
        tensor
        for tensor in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        if not getattr(tensor, "ds_pipe_replicated", False) and (is_first or is_model_parallel_parameter(tensor))
    ]
    return _read_norm(counted, mpu)


def _norm_of_flat_gradients(
    parameters: Any,  # noqa: ANN401
    norm_type: float = 2,
    mpu: Any = None,  # noqa: ANN401
    grad_norm_mask: Sequence[torch.Tensor] | None = None,
) -> float:
    """The norm of the gradients of flat groups; `grad_norm_mask` has the ranges [number, 2] of each that do not
    count.
    """
    assert norm_type == 2, norm_type
    gradients = []
    for index, param in enumerate(each for each in parameters if each.grad is not None):
        gradient, ranges = param.grad.detach(), None if grad_norm_mask is None else grad_norm_mask[index]
        if ranges is not None and len(ranges):
            changes = torch.zeros(len(gradient) + 1, dtype=torch.int32, device=gradient.device)
            for column, change in ((0, 1), (1, -1)):
                changes.index_add_(0, ranges[:, column], changes.new_full((len(ranges),), change))
            gradient = gradient.masked_fill(changes.cumsum(0)[:-1] > 0, 0.0)
        gradients.append(gradient)
    return _read_norm(gradients, mpu)


def _read_norm(tensors: Sequence[torch.Tensor], mpu: Any) -> float:  # noqa: ANN401
    total = _sum_of_squares(tensors).float()
    if mpu is not None:
        dist.all_reduce(total, group=mpu.get_model_parallel_group())
    return float(_checked(total.pow(0.5)))


def _copied_to_host(norms: Any) -> Any:  # noqa: ANN401 - one norm, or those of groups
    """Norms on the host, where offloaded gradients are, by one copy."""
    return norms.cpu() if isinstance(norms, torch.Tensor) else list(torch.stack(norms).cpu().unbind())


def _norm_at_stages_1_and_2(optimizer: Any, gradients: Sequence[Any], params: Sequence[Any]) -> torch.Tensor:  # noqa: ANN401
    """The norm of a group, fp32 scalar, -1 where it is not finite: DeepSpeed's function for the 2-norm, without its
    copies of constants.
    """
    held = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
    counted = [
        gradient
        for gradient, param in zip(held, params, strict=False)
        if not getattr(param, "ds_pipe_replicated", False) and _counts(optimizer, param)
    ]
    total = _sum_of_squares(counted).float()
    dist.all_reduce(total, group=optimizer.dp_process_group)
    optimizer._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
    return _checked(total.pow(0.5))


def _norm_at_stage_3(optimizer: Any, gradients: Sequence[Any], params: Sequence[Any]) -> torch.Tensor:  # noqa: ANN401
    """The norm of a group at stage 3, fp64 where the device has it, -1 where it is not finite."""
    optimizer._assert_same_partition_group(params)
    group = optimizer._get_param_partition_group(params[0])
    counts_every_rank = optimizer._grad_norm_counts_every_rank(params, group)
    counted = [
        gradient
        for gradient, param in zip(gradients, params, strict=False)
        if counts_every_rank or _counts(optimizer, param)
    ]
    total = _sum_of_squares(counted)
    dist.all_reduce(total, group=group)
    if not counts_every_rank:
        optimizer._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
    experts = optimizer._autoep_expert_parallel_group(params)
    if experts is not None:
        dist.all_reduce(total, group=experts)
    return _checked(total.pow(0.5))


def _counts(optimizer: Any, param: Any) -> bool:  # noqa: ANN401
    """Whether a norm counts what this rank holds of a parameter: tensor parallel ranks may each hold all of it, and
    then only the first of them counts it.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    return is_model_parallel_parameter(param) or optimizer.model_parallel_rank == 0


def _sum_of_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.utils import get_norm_dtype

    device, dtype = get_accelerator().current_device_name(), get_norm_dtype()
    blocks = chain.from_iterable(_blocks_of(gradient.detach()) for gradient in gradients)
    norms = [torch.linalg.vector_norm(block.to(dtype)).to(device) for block in blocks]
    return torch.stack(norms).pow(2).sum() if norms else torch.zeros((), dtype=dtype, device=device)


def _blocks_of(gradient: torch.Tensor) -> Sequence[torch.Tensor]:
    """A gradient in blocks whose copies in fp64 stay in the caches of a CPU, or take little memory of a GPU."""
    return gradient.reshape(-1).split(_NORM_NUMBERS if gradient.device.type == "cpu" else _NORM_NUMBERS_OF_GPU)


def _checked(norm: torch.Tensor) -> torch.Tensor:
    return norm.masked_fill(~norm.isfinite(), -1.0)
