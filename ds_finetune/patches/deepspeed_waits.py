"""DeepSpeed's ZeRO optimizers: in a step the host waits for the device once, to read the norm of the gradient.

DeepSpeed 0.19.8 waits for flags of overflow, for constants that it copies to the device for each parameter group, and
for the same norm once more for each group that is clipped.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.patches.foreign import Foreign, replaced

_INVALID = Foreign("deepspeed", "runtime/utils.py:231, zero/stage_1_and_2.py:3043, 3203, stage3.py:2888")
_OVERFLOW = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:3029-3044, 3234, stage3.py:2811-2820, 2881-2889")
_NORM_1_2 = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:2648-2702")
_NORM_3 = Foreign("deepspeed", "runtime/zero/stage3.py:2419-2486")
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
        self._norm = math.nan
        kind = type(optimizer)
        self._module = sys.modules[kind.__module__]
        _INVALID.attribute(self._module, "is_invalid_grad_norm")
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
        if "muon" not in type(optimizer.optimizer).__name__.lower():
            optimizer.has_overflow = lambda *_, **__: has_bad_gradient()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Open during a step of the optimizer."""
        self._read.clear()
        self._norm = math.nan
        with replaced(self._module, "is_invalid_grad_norm", self.is_invalid):
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
        has_scale = float(self._optimizer.loss_scale) != 1
        return norm.item() if has_scale else self._norm

    def _value(self, norm: torch.Tensor) -> float:
        for known, value in self._read:
            if known is norm:
                return value
        self._norm = norm.item()
        self.remember(norm, self._norm)
        return self._norm


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
    """The same of a group at stage 3, fp64 where the device has it."""
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
    """Whether this rank's part of a parameter counts: of those that tensor parallel ranks hold whole, the first's."""
    from deepspeed.runtime.utils import is_model_parallel_parameter

    return is_model_parallel_parameter(param) or optimizer.model_parallel_rank == 0


def _sum_of_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.utils import get_norm_dtype

    device, dtype = get_accelerator().current_device_name(), get_norm_dtype()
    norms = [torch.linalg.vector_norm(gradient.detach().to(dtype)).to(device) for gradient in gradients]
    return torch.stack(norms).pow(2).sum() if norms else torch.zeros((), dtype=dtype, device=device)


def _checked(norm: torch.Tensor) -> torch.Tensor:
    return norm.masked_fill(~norm.isfinite(), -1.0)
