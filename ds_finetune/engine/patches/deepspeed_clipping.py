"""Clipping in DeepSpeed's ZeRO optimizers, with a separate norm for parameters that only an auxiliary loss trains."""

import math
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.state.parameter_tags import loss_of
from ds_finetune.foreign.guard import Foreign, replaced

if TYPE_CHECKING:
    from ds_finetune.engine.engine import Engine

_NORM = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:2943-2960")
_NORM_GROUPS = Foreign("deepspeed", "runtime/zero/stage3.py:2573-2584")
_CLIP = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:3193, stage3.py:2979")
_GROUP_NORM = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:1914, 2648, stage3.py:1975, 2419")


class OwnClipping:
    """Gives a ZeRO optimizer separate gradient clipping for parameters that only an auxiliary loss trains.

    The norm of the other parameters excludes them. Each step sets the engine's `own_norms`, one norm for each auxiliary
    loss by name. All ranks have the same names, though pipeline stages may have different parameter groups. If one norm
    or any gradient is not finite, all norms become infinite on all ranks, so that the step is skipped. An invalid norm
    alone makes DeepSpeed skip a step only in fp32 (zero/stage_1_and_2.py:3042) and at stage 3 (zero/stage3.py:2888).
    """

    def __init__(self, engine: "Engine", optimizer: Any, groups: Groups) -> None:  # noqa: ANN401
        self._engine, self._optimizer, self._names = engine, optimizer, tuple(engine.own_norms)
        self._shards = groups.tensor.group if groups.tensor is not None else None
        self._is_partitioned = hasattr(optimizer, "_get_norm_groups")
        location, name, self._groups = (
            (_NORM_GROUPS, "_get_norm_groups", "fp16_groups")
            if self._is_partitioned
            else (_NORM, "scaled_global_norm", "bit16_groups")
        )
        location.source(type(optimizer), f"for i, group in enumerate(self.{self._groups}):")
        self._losses = [loss_of(group[0]) for group in location.attribute(optimizer, self._groups)]
        self._first = sum(loss is None for loss in self._losses)
        assert None not in self._losses[self._first :], "a group that counts follows one that does not"
        self._others_norm = location.attribute(optimizer, name)
        self._combine = location.attribute(sys.modules[type(optimizer).__module__], "combine_grad_norm_groups")
        self._clip_group = _CLIP.attribute(optimizer, "unscale_and_clip_grads")
        self._is_offloaded = optimizer.offload_optimizer if self._is_partitioned else optimizer.cpu_offload
        self._own: dict[str, torch.Tensor] = {}
        setattr(optimizer, name, self._norm)
        optimizer.unscale_and_clip_grads = self._clip

    def _norm(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a norm, or a list of those of groups
        """Replaces DeepSpeed's function for the gradient norm, and returns a number or a list as that function does.
        Parameters that only an auxiliary loss trains are excluded from the norm.
        """
        from deepspeed.accelerator import get_accelerator

        groups = getattr(self._optimizer, self._groups)
        with replaced(self._optimizer, self._groups, groups[: self._first]):
            others_norm = self._others_norm(*args, **kwargs)
        squares = torch.zeros(len(self._names), device=get_accelerator().current_device_name())
        for loss, norm in zip(self._losses[self._first :], self._own_norms(), strict=True):
            assert loss is not None
            squares[self._names.index(loss)] += torch.where(norm < 0, float("inf"), norm).to(squares) ** 2
        # The reduction also adds up the equal norms of a stage's tensor parallel ranks, so the sum is divided below.
        _GROUP_NORM.attribute(self._optimizer, "_model_parallel_all_reduce")(tensor=squares, op=dist.ReduceOp.SUM)
        own = (squares / (1 if self._shards is None else dist.get_world_size(self._shards))).sqrt()
        return self._read(self._combine(others_norm) if self._is_partitioned else others_norm, own)

    def _read(self, norm: torch.Tensor, own: torch.Tensor) -> Any:  # noqa: ANN401 - a norm, or a list of one
        """Read all gradient norms with one device synchronisation. Returns `norm`, at stage 3 in a list."""
        norm = norm.to(own.device)
        value, *values = torch.cat([norm[None], own.to(norm.dtype)]).tolist()
        scale = self._optimizer.loss_scale
        self._engine.own_norms = {name: each / scale for name, each in zip(self._names, values, strict=True)}
        if self._engine.has_bad_gradient or not all(map(math.isfinite, (value, *values))):
            norm, value = torch.full_like(norm, math.inf), math.inf
        if self._is_offloaded:
            # Offloaded gradients are clipped on the host, so the norms must be there too.
            norm, own = (torch.tensor(number, dtype=norm.dtype) for number in (value, values))
        self._own = dict(zip(self._names, own.unbind(), strict=True))
        return [norm] if self._is_partitioned else norm

    def _own_norms(self) -> list[torch.Tensor]:
        """Norms of parameter groups that only auxiliary losses train, over this stage's ranks; -1 if not finite."""
        optimizer, norms = self._optimizer, []
        is_offloaded = self._is_offloaded
        name = "complete_grad_norm_calculation_for_cpu_offload" if is_offloaded else "get_grad_norm_direct"
        norm_of = _GROUP_NORM.attribute(optimizer, name)
        # At ZeRO stages 1 and 2, DeepSpeed would reduce each norm over pipeline stages, which may have different
        # parameter groups. ZeRO-3 is not used with pipelines.
        own_shards = replaced(optimizer, "model_parallel_group", self._shards)
        with nullcontext() if self._is_partitioned else own_shards:
            for i in range(self._first, len(self._losses)):
                params = optimizer.fp16_groups[i] if self._is_partitioned else optimizer.params_in_partition[i]
                norms.append(norm_of(params) if is_offloaded else norm_of(optimizer.averaged_gradients[i], params))
        return norms

    def _clip(self, group: Any, total_norm: torch.Tensor) -> None:  # noqa: ANN401 - a number, or gradients
        """Replaces DeepSpeed's clipping. `group` is a parameter group's number at ZeRO stage 3, else its gradients."""
        partitions = [] if self._is_partitioned else self._optimizer.single_partition_of_fp32_groups
        numbers = (number for number, partition in enumerate(partitions) if partition.grad is group[0])
        loss = self._losses[group if self._is_partitioned else next(numbers)]
        self._clip_group(group, total_norm if loss is None else self._own[loss].to(total_norm))
