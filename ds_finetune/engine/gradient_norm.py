"""The norm of the whole gradient where the engine clips itself (ZeRO 0 in fp32)."""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ds_finetune.engine.parameter_tags import is_apart, is_expert
from ds_finetune.engine.pipeline_schedule import is_copy
from ds_finetune.engine.process_groups import Groups


def global_gradient_norm(params: Sequence[nn.Parameter], groups: Groups, device: torch.device) -> float:
    """Norm of the whole gradient, after its reduction over data parallel ranks; this rank holds a shard of it.
    Collective.

    Each element counts once: tensor parallel shards are summed over their group, experts over theirs, everything
    over the pipeline's stages. Parameters that are apart do not count.
    """
    square = torch.zeros((), device=device)
    for has_shards, has_experts in itertools.product((False, True), repeat=2):
        grads = [
            param.grad
            for param in params
            if param.grad is not None
            and not is_copy(param)
            and not is_apart(param)
            and (_is_shard(param), is_expert(param)) == (has_shards, has_experts)
        ]
        part = torch.nn.utils.get_total_norm(grads).to(device) ** 2
        for group, is_distributed in ((groups.tensor, has_shards), (groups.experts, has_experts), (groups.stage, True)):
            if group is not None and is_distributed:
                dist.all_reduce(part, group=group.group)
        square += part
    return float(square.sqrt())


def _is_shard(param: nn.Parameter) -> bool:
    """Whether this is a tensor parallel rank's part of a parameter, as start_engine.py marks it."""
    return bool(param.model_parallel)  # type: ignore[attr-defined]
