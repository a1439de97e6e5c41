"""The fp32 master weights of each ZeRO stage, and which parts of which parameters they hold."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_finetune.plan.plan import Plan


@dataclass(frozen=True)
class Part:
    """Elements `start` to `start + numel` of the flattened parameter `name` of `shape`, which begin at `offset` of
    their master.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int


@dataclass(frozen=True, eq=False)
class Master:
    """A tensor an optimizer steps on, the parameter parts in it, and its number; on NVMe it is empty until swapped in.

    `wholes` are the positions of the same parameters in a buffer that holds each of them whole, as Muon's momentum does
    below stage 3 (zero/stage_1_and_2.py:2805). A parameter that two ranks share is then whole on both.
    """

    flat: torch.Tensor
    parts: tuple[Part, ...]
    number: int
    is_swapped: bool = False
    wholes: tuple[Part, ...] = ()

    def parts_in(self, held: torch.Tensor, *, restoring: bool) -> tuple[Part, ...]:
        """The parts in `held`, a state of this master: each element by one rank to save them, by all that hold it to
        restore.
        """
        if held.numel() == self.flat.numel():
            return self.parts
        if restoring:
            return self.wholes
        begins = {part.name: part.offset for part in self.wholes}
        return tuple(replace(part, offset=begins[part.name] + part.start) for part in self.parts)


def master_weights(wrapped: Any, plan: Plan) -> list[Master]:  # noqa: ANN401 - a DeepSpeedEngine
    """The masters of this rank, with parameters by Hugging Face name and without padding. A parameter in no master is
    not trained.
    """
    names = {id(param): name.removeprefix("lm.") for name, param in wrapped.module.named_parameters()}
    optimizer = wrapped.optimizer
    if plan.zero_stage == 3:
        return list(_masters_of_stage_3(optimizer, names, plan))
    if plan.zero_stage:
        return [_master_of_group(optimizer, number, names) for number in range(len(optimizer.bit16_groups))]
    if plan.precision == "fp32":
        trained = [param for group in optimizer.param_groups for param in group["params"]]
        return [Master(param, (_whole(param, names, 0),), number) for number, param in enumerate(trained)]
    return list(_masters_of_stage_0(optimizer, names))


def _whole(param: torch.Tensor, names: dict[int, str], offset: int) -> Part:
    return Part(names[id(param)], tuple(param.shape), 0, param.numel(), offset)


def _masters_of_stage_0(optimizer: Any, names: dict[int, str]) -> Iterator[Master]:  # noqa: ANN401
    """Stage 0 in 16 bits: a copy of each parameter (fp16/unfused_optimizer.py), or of each group
    (fp16/fused_optimizer.py).
    """
    if hasattr(optimizer, "fp32_groups"):
        pairs = [
            pair
            for groups in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            for pair in zip(*groups, strict=True)
        ]
        yield from (Master(flat, (_whole(param, names, 0),), number) for number, (param, flat) in enumerate(pairs))
        return
    for number, (group, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        offset, parts = 0, []
        for param in group:
            parts.append(_whole(param, names, offset))
            offset += param.numel()
        yield Master(flat, tuple(parts), number)


def _master_of_group(optimizer: Any, number: int, names: dict[int, str]) -> Master:  # noqa: ANN401
    """Stages 1 and 2: this rank's equal part of a group's flattened parameters (utils/mixed_precision_linkage.py)."""
    parts = []
    for param in optimizer.bit16_groups[number]:
        mapping = param._hp_mapping
        if mapping is not None:
            where = mapping.lp_fragment_address
            parts.append(
                Part(names[id(param)], tuple(param.shape), where.start, where.numel, mapping.hp_fragment_address.start)
            )
    offset, wholes = 0, []
    for param in optimizer.params_in_partition[number]:
        wholes.append(_whole(param, names, offset))
        offset += param.numel()
    return Master(optimizer.single_partition_of_fp32_groups[number], tuple(parts), number, wholes=tuple(wholes))


def _masters_of_stage_3(optimizer: Any, names: dict[int, str], plan: Plan) -> Iterator[Master]:  # noqa: ANN401
    """Stage 3: equal flat parts of each parameter, one after the other in sub-groups (zero/stage3.py,
    grad_position).
    """
    for number, group in enumerate(optimizer.fp16_groups):
        parts = []
        for param in group:
            _, offset, held = optimizer.grad_position[optimizer.get_param_id(param)]
            start = min(optimizer._get_param_partition_rank(param) * held, param.ds_numel)
            parts.append(
                Part(names[id(param)], tuple(param.ds_shape), start, min(held, param.ds_numel - start), offset)
            )
        is_swapped = plan.offload_optimizer == "nvme" and optimizer._swappable_optimizer_subgroup(number)
        yield Master(
            optimizer.fp32_partitioned_groups_flat[number],
            tuple(part for part in parts if part.numel),
            number,
            is_swapped,
        )
