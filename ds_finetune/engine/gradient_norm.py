"""The norm of the whole gradient, and clipping, where the engine clips itself (ZeRO 0 in fp32)."""

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.state.parameter_tags import is_copy, is_expert, loss_of


def clip_gradients(
    params: Sequence[nn.Parameter], max_norm: float, groups: Groups, *, losses: Iterable[str], device: torch.device
) -> list[float]:
    """Scale the gradients of `params` down to a norm of at most `max_norm`, 0 for any, and return their norm before;
    then those of the parameters that only one of `losses` trains, which are scaled by themselves. Collective.

    Where a norm is not finite nothing is scaled.
    """
    parts = [[param for param in params if loss_of(param) == loss] for loss in (None, *losses)]
    norms = torch.stack([global_gradient_norm(part, groups, device) for part in parts])
    found = norms.tolist()
    if max_norm and all(map(math.isfinite, found)):
        for part, norm in zip(parts, norms.unbind(), strict=True):
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return found


def global_gradient_norm(params: Sequence[nn.Parameter], groups: Groups, device: torch.device) -> torch.Tensor:
    """Norm of the whole gradient, after its reduction over data parallel ranks, fp32 scalar on `device`; this rank
    holds a shard of the gradient. Collective.

    Each element counts once: tensor parallel shards are summed over their group, experts over theirs, everything
    over the pipeline's stages.
    """
    square = torch.zeros((), device=device)
    for has_shards, has_experts in itertools.product((False, True), repeat=2):
        grads = [
            param.grad
            for param in params
            if param.grad is not None
            and not is_copy(param)
            and (_is_shard(param), is_expert(param)) == (has_shards, has_experts)
        ]
        # torch makes the norm of no gradients on the host.
        part = torch.nn.utils.get_total_norm(grads).to(device) ** 2 if grads else torch.zeros((), device=device)
        for group, is_distributed in ((groups.tensor, has_shards), (groups.experts, has_experts), (groups.stage, True)):
            if group is not None and is_distributed:
                dist.all_reduce(part, group=group.group)
        square += part
    return square.sqrt()


def _is_shard(param: nn.Parameter) -> bool:
    """Whether this is a tensor parallel rank's part of a parameter, as start_engine.py marks it."""
    return bool(param.model_parallel)  # type: ignore[attr-defined]
