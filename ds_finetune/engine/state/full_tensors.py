"""Access to tensors that are distributed over ranks: a rank's partition of a ZeRO-3 parameter, and full tensors.

A partition is in memory or on NVMe. Full tensors are gathered one at a time on rank zero's CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.state.parameter_tags import is_copy, local_shape
from ds_finetune.families.table import family_of
from ds_finetune.model.build.skeleton import Fragment, full_fragment, in_memory
from ds_finetune.model.parallel.expert import ExpertParallelGroup
from ds_finetune.model.parallel.sharding import ModelShard
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.model.quantised.four_bit import dequantised, dtype_of, is_four_bit, shape_of
from ds_finetune.plan.plan import Plan

_PIECE = 2**26
"""Number of elements of a tensor that a pipeline stage sends to rank zero at a time."""


class FullTensors:
    """Gathers the full parameters and persistent buffers of `module`, which DeepSpeed wraps."""

    def __init__(self, module: nn.Module, plan: Plan, groups: Groups, device: torch.device) -> None:
        self._module, self._plan, self._groups, self._device = module, plan, groups, device
        self._stage = groups.stage
        lm: Any = module.lm
        self._model_shard = ModelShard.of(plan.mesh, family_of(lm.config.model_type))
        in_fp32: Any = module.in_fp32
        self._in_fp32: dict[str, torch.Tensor] = in_fp32.values
        specs = {}
        for name, param in named_parameters(self._module):
            if not is_copy(param):
                shape = shape_of(param) if is_four_bit(param) else local_shape(param)
                whole_shape = self._model_shard.tensor_shard(name, shape).full_shape
                dtype = torch.float32 if name in self._in_fp32 else dtype_of(param)
                specs[name] = torch.empty(whole_shape, dtype=dtype, device="meta")
        own_specs = specs | {name: buffer.to("meta") for name, buffer in persistent_buffers(self._module)}
        self._specs = [own_specs] if self._stage is None else self._stage.all_gather_object(own_specs)

    def specs(self) -> dict[str, torch.Tensor]:
        """Shapes and dtypes of the full tensors of all stages by Hugging Face name, as meta tensors."""
        return {name: spec for specs in self._specs for name, spec in specs.items()}

    def gather(self, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield the wanted full tensors by name, on rank zero's CPU; on other ranks the tensors are None. Collective:
        every rank must exhaust the iterator. A barrier precedes each tensor, so that no rank waits in a collective for
        longer than rank zero needs for one tensor.
        """
        own_tensors = dict(named_parameters(self._module)) | dict(persistent_buffers(self._module)) | self._in_fp32
        for stage, specs in enumerate(self._specs):
            tensors = own_tensors if stage == self._plan.mesh.coordinate("pp") else {}
            for name, spec in ((name, spec) for name, spec in specs.items() if is_wanted(name)):
                dist.barrier()
                with gather_zero3(tensors.get(name)):
                    tensor = self.gather_shards(name, dequantised(tensors[name])) if name in tensors else None
                    yield name, self._send_to_rank_zero(tensor, spec, stage)

    def gather_shards(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Gather a full tensor on the first rank of its pipeline stage. `part` is this rank's shard, sharded like the
        parameter `name`. Other ranks return a part of the tensor.
        """
        shard = self._model_shard.tensor_shard(name, tuple(part.shape))
        box = part.reshape(shard.local_shape)
        mesh = self._plan.mesh
        if mesh.rank not in mesh.holders_of_leader():
            return box
        experts = self._groups.experts if shard.is_expert_parallel and mesh.coordinate("tp") == 0 else None
        # States of an offloaded optimizer are on the CPU, but NCCL gathers only tensors on the GPU.
        if self._groups.tensor is not None and shard.dim is not None:
            end = torch.device("cpu") if experts is None else self._device
            box = _gather_on_first(box.to(self._device), self._groups.tensor, dim=shard.dim, end=end)
        if experts is not None:
            box = _gather_on_first(box.to(self._device), experts, dim=0, end=torch.device("cpu"))
        return box.reshape(shard.full_shape) if mesh.rank == mesh.leader else box

    def _send_to_rank_zero(self, tensor: torch.Tensor | None, spec: torch.Tensor, stage: int) -> torch.Tensor | None:
        mesh = self._plan.mesh
        is_rank_zero = self._plan.world.rank == 0
        if self._stage is not None and stage and mesh.rank == mesh.leader:
            if mesh.coordinate("pp") == stage:
                assert tensor is not None
                for piece in tensor.reshape(-1).split(_PIECE):
                    self._stage.send(piece.to(self._device), to=0)
            elif is_rank_zero:
                tensor = torch.empty_like(spec, device="cpu")
                for piece in tensor.view(-1).split(_PIECE):
                    piece.copy_(self._stage.receive(torch.empty_like(piece, device=self._device), source=stage))
        return tensor.cpu() if is_rank_zero and tensor is not None else None


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the module by Hugging Face name."""
    return [(name.removeprefix("lm."), param) for name, param in module.named_parameters()]


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent buffers of the module by Hugging Face name."""
    for name, buffer in module.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in module.get_submodule(owner)._non_persistent_buffers_set:
            yield name.removeprefix("lm."), buffer


def gather_zero3(param: torch.Tensor | None) -> Any:  # noqa: ANN401 - a context manager of DeepSpeed
    """Context in which a ZeRO-3 parameter is gathered on every rank."""
    if not hasattr(param, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([param])


def _gather_on_first(
    part: torch.Tensor, group: TensorParallelGroup | ExpertParallelGroup, *, dim: int, end: torch.device
) -> torch.Tensor:
    """Concatenate a group's parts of a tensor along `dim`, on device `end` of the first rank; others return `part`."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size)] if group.group_rank == 0 else None
    dist.gather(part, parts, group=group.group, group_dst=0)
    return part if parts is None else torch.cat([tensor.to(end) for tensor in parts], dim=dim)


def partition(param: torch.Tensor) -> Fragment:
    """This rank's partition of a ZeRO-3 parameter: `ds_tensor`, one of equal flat pieces (DeepSpeed 0.19.8,
    zero/partition_parameters.py). A partition on NVMe is read into a buffer of the swapper when it is opened, and
    written back when it is closed. A parameter that ZeRO-3 does not partition is complete on this rank.
    """
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    if not hasattr(param, "ds_tensor"):
        return full_fragment(param)
    zero_param: Any = param
    numel, shape = int(zero_param.ds_tensor.ds_numel), tuple(zero_param.ds_shape)
    start = dist.get_rank(zero_param.ds_process_group) * numel
    # Partitions smaller than one aio block stay in memory (swap_tensor/partitioned_param_swapper.py:135).
    if zero_param.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE:
        return Fragment(start, numel, shape, lambda: _swap_in(zero_param))
    return in_memory(zero_param.ds_tensor.data.view(-1), start=start, shape=shape)


@contextmanager
def _swap_in(param: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - a parameter with ZeRO-3's attributes
    swapper = param.nvme_swapper
    swapper.swap_in([param], async_op=False)
    try:
        yield param.ds_tensor.data.view(-1)
    finally:
        # The write to NVMe is synchronous. It also releases the buffer and marks the partition as not in memory.
        swapper.swap_out_and_release([param])
