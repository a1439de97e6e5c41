"""Attributes and optimizer groups by which DeepSpeed recognises parameters of experts, parameters that another pipeline
stage also has, and parameters without weight decay.
"""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.plan.plan import Plan

_KINDS = ((False, True), (False, False), (True, True), (True, False))
"""Kinds of optimizer groups: whether a group has parameters of experts, and whether it has weight decay."""


def tag_expert(param: nn.Parameter, *, groups: Groups) -> None:
    """Mark a parameter of this rank's experts, which only the ranks of `groups.same_experts` have. Below stage 3
    DeepSpeed reads `allreduce` and `group_name` (0.19.8, moe/utils.py:29). At stage 3 it reads the placement
    attributes, which must be set before `zero.Init` partitions the parameter (zero/partition_parameters.py:1302,
    zero/stage3.py:675).
    """
    expert: Any = param
    expert.allreduce, expert.group_name = False, groups.expert_name
    expert.ds_zero_placement_family, expert.ds_zero_partition_group_name = "autoep_expert", groups.expert_name
    expert.ds_zero_partition_process_group = groups.same_experts
    expert.ds_zero_partition_rank, expert.ds_zero_partition_world_size = (
        dist.get_rank(groups.same_experts),
        dist.get_world_size(groups.same_experts),
    )


def is_expert(param: torch.Tensor) -> bool:
    """Whether `tag_expert` has marked the parameter."""
    return getattr(param, "ds_zero_placement_family", "") == "autoep_expert"


def tag_auxiliary(param: nn.Parameter, loss: str) -> None:
    """Mark a parameter whose gradient comes only from the auxiliary loss `loss`. Such parameters are clipped by their
    own gradient norm, and excluded from the norm of the others.
    """
    param.ds_finetune_auxiliary_loss = loss  # type: ignore[attr-defined]


def loss_of(param: torch.Tensor) -> str | None:
    """Name of the auxiliary loss with which `tag_auxiliary` has marked the parameter; None for other parameters."""
    return getattr(param, "ds_finetune_auxiliary_loss", None)


def mark_copy(param: nn.Parameter) -> None:
    """Mark a parameter that another pipeline stage also has. Gradient norms (DeepSpeed 0.19.8,
    zero/stage_1_and_2.py:2680) and checkpoints skip marked parameters.
    """
    param.ds_pipe_replicated = True  # type: ignore[attr-defined]


def is_copy(param: torch.Tensor) -> bool:
    """Whether `mark_copy` has marked the parameter."""
    return getattr(param, "ds_pipe_replicated", False)


def experts_marker(parts: int) -> nn.Module:
    """An empty module of the class by which DeepSpeed's engine detects experts (0.19.8, runtime/engine.py:2100)."""
    from deepspeed.moe.layer import MoE

    class Marker(MoE):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = parts

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """Do nothing, because this program has registered the experts' process groups already."""

    return Marker()


def parameter_groups(model: nn.Module, plan: Plan, groups: Groups) -> list[dict[str, Any]]:
    """Optimizer groups: weights have weight decay, norms and biases (also 2-D ones, the fused biases of experts) have
    none, and experts have separate groups of both kinds. Groups that only an auxiliary loss trains are last, so that
    they do not change the flat partitions of the other groups. Other settings come from DeepSpeed's optimizer section.
    """
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    decaying = {name for name, p in trained.items() if len(local_shape(p)) > 1 and not name.endswith("bias")}
    losses = sorted({loss for loss in map(loss_of, trained.values()) if loss is not None})
    optimizer_groups: list[dict[str, Any]] = []
    for loss, (of_experts, decays) in itertools.product((None, *losses), _KINDS):
        kind = loss, of_experts, decays
        params = [p for name, p in trained.items() if (loss_of(p), is_expert(p), name in decaying) == kind]
        if params:
            optimizer_groups.append({"params": params, "weight_decay": plan.optim.weight_decay if decays else 0.0})
    if groups.experts is not None and plan.zero_stage < 3:
        for group in optimizer_groups:
            is_moe = any(map(is_expert, group["params"]))
            group |= {"moe": is_moe, "name": groups.expert_name if is_moe else "shared"}
    return optimizer_groups


def local_shape(param: torch.Tensor) -> tuple[int, ...]:
    """Shape of a parameter on this rank before ZeRO-3 partitions it."""
    return tuple(getattr(param, "ds_shape", param.shape))
