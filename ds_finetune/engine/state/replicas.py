"""Compares replicated weights bit by bit, because replicas on different ranks must stay equal in training.

Tensor parallel ranks replicate routers, norms and biases, and reduce their gradients over different communicators. The
first and the last pipeline stage both have a tied embedding. Without ZeRO all data parallel ranks have all weights, and
every rank has the buffers. A checkpoint or export contains one of the replicas, and would hide that others differ.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.engine.groups.collectives import all_gather_object, all_reduce_max, collective_device
from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.state.full_tensors import named_parameters, persistent_buffers
from ds_finetune.engine.state.parameter_tags import local_shape
from ds_finetune.engine.state.state import BUFFER, WEIGHT, EngineState
from ds_finetune.errors import RunError
from ds_finetune.families.table import family_of
from ds_finetune.model.parallel.sharding import ModelShard, TensorShard
from ds_finetune.plan.plan import Plan

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 2**18
"""Number of elements that are summed or compared at a time: 2 MiB as int64. With 32 MiB, the sum on a CPU was six times
as slow, because of fresh memory pages.
"""
_MIX = 0x1E3779B97F4A7C15
"""An odd 61-bit number whose multiples modulo 2**64 are spread evenly."""


@dataclass(frozen=True)
class _Copies:
    """Tensors that are replicated on the ranks of `group` (None: all ranks). `sizes` are their numbers of elements by
    name. With `is_divided`, each replica is divided among the ranks of `shards` (None: all ranks), because ZeRO
    partitions it, differently at the two ends of a pipeline.
    """

    group: dist.ProcessGroup | None
    sizes: Mapping[str, int]
    is_divided: bool = False
    shards: dist.ProcessGroup | None = None


def check_replicas(
    module: Any,  # noqa: ANN401 - the module under DeepSpeed
    state: EngineState,
    plan: Plan,
    groups: Groups,
    *,
    embedding: str | None,
) -> None:
    """Raise RunError on every rank if replicas of a tensor differ. It names tensor, element, both ranks and values.

    Collective. The optimizer's fp32 weights, saved frozen weights and buffers are compared. `embedding` is the name of
    the weight that both ends of a pipeline train, None on other stages. The comparison takes 5.3 ns of a CPU core per
    replicated element (0.5 s for 1e8). Under ZeRO with tensor parallelism, routers, norms and down-projections of
    latents are replicated. Elements that only one rank has are not read.
    """
    if plan.mesh.world_size == 1:
        return
    replicated = [copies for copies in _copies(module, plan, groups, embedding) if copies.sizes]
    sums = {key: torch.zeros((), dtype=torch.int64) for copies in replicated for key in copies.sizes}

    def add(key: str, start: int, elements: torch.Tensor) -> None:
        sums[key] = _checksum(elements, start)

    _read(state, sums, add)
    differing = [(copies, keys[0]) for copies in replicated if (keys := _unequal(copies, sums))]
    (any_differs,) = all_reduce_max(bool(differing))
    if any_differs:
        # Each rank handles the groups of one kind before those of the next, or ranks of several groups would hang.
        difference = next(filter(None, [_first_difference(copies, key, state) for copies, key in differing]), "")
        raise RunError(
            f"copies of a weight on several ranks differ: {next(filter(None, all_gather_object(difference)))}",
            hint="this step is neither saved nor exported; test the devices of these ranks, and start the same command "
            "again to resume from the last checkpoint, with NCCL_ALGO=Ring if copies differ again",
        )


def _copies(module: Any, plan: Plan, groups: Groups, embedding: str | None) -> Iterator[_Copies]:  # noqa: ANN401
    model_shard = ModelShard.of(plan.mesh, family_of(module.lm.config.model_type))
    shapes = {name: local_shape(param) for name, param in named_parameters(module)}
    buffers = {f"{BUFFER}/{name}": buffer.numel() for name, buffer in persistent_buffers(module)}

    def weights(is_wanted: Callable[[TensorShard], bool]) -> dict[str, int]:
        return {
            f"{WEIGHT}/{name}": math.prod(shape)
            for name, shape in shapes.items()
            if is_wanted(model_shard.tensor_shard(name, shape))
        }

    is_whole = plan.zero_stage == 0
    if groups.tensor is not None:
        yield _Copies(groups.tensor.group, weights(lambda shard: shard.dim is None) | buffers)
    if plan.mesh.dp * plan.mesh.sp > 1:
        yield _Copies(groups.same_shard, weights(lambda shard: is_whole and not shard.is_expert_parallel) | buffers)
    if groups.experts is not None:
        yield _Copies(groups.same_experts, weights(lambda shard: is_whole and shard.is_expert_parallel))
    if embedding is not None and groups.stage is not None:
        size = {f"{WEIGHT}/{embedding}": math.prod(shapes[embedding])}
        yield _Copies(groups.stage.embedding_group, size, is_divided=not is_whole, shards=groups.same_shard)


def _read(state: EngineState, keys: Container[str], use: Callable[[str, int, torch.Tensor], None]) -> None:
    groups = [(group, [part for part in group.slices if part.key in keys]) for group in state.groups(restoring=True)]
    for group, slices in filter(itemgetter(1), groups):
        with group.opened(False) as read:
            for part in slices:
                use(part.key, part.start, read(part.key))


def _bits(elements: torch.Tensor) -> torch.Tensor:
    return elements.view(_INTEGERS[elements.element_size()])


def _checksum(elements: torch.Tensor, start: int) -> torch.Tensor:
    """Checksum of elements from index `start` on: the sum modulo 2**64 of each element's bits times an odd number that
    depends on the index. The checksums of a tensor's parts add up to the checksum of the tensor. Tensors that differ in
    exactly one element have different checksums.
    """
    total = torch.zeros((), dtype=torch.int64, device=elements.device)
    for number, piece in enumerate(_bits(elements).split(_PIECE)):
        begin = start + number * _PIECE
        mixed = torch.arange(begin, begin + len(piece), device=elements.device) * _MIX
        total += (piece * ((mixed ^ (mixed >> 32)) * _MIX | 1)).sum()
    return total


def _unequal(copies: _Copies, sums: Mapping[str, torch.Tensor]) -> list[str]:
    """Keys of the tensors that differ between the ranks of `copies.group`. Each of these ranks gets the same keys."""
    own_sums = torch.stack([sums[key].to(collective_device()) for key in copies.sizes])
    if copies.is_divided:
        dist.all_reduce(own_sums, group=copies.shards)
    # One all-reduce gives maximum and minimum: the largest ~x belongs to the smallest x, without overflow.
    extremes = torch.cat([own_sums, ~own_sums])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=copies.group)
    largest, smallest = extremes.chunk(2)
    return [key for key, differs in zip(copies.sizes, (largest != ~smallest).tolist(), strict=True) if differs]


def _first_difference(copies: _Copies, key: str, state: EngineState) -> str:
    """Text on the first element that differs between this rank and the group's first rank; empty if all are equal."""
    elements_at = {}
    _read(state, (key,), lambda _, start, elements: elements_at.update({start: elements.clone()}))
    start, own = next(iter(elements_at.items()), (0, torch.zeros(0)))
    bits, line = _bits(own), ""
    for begin in range(0, copies.sizes[key], _PIECE):
        piece = torch.zeros(min(_PIECE, copies.sizes[key] - begin), dtype=bits.dtype)
        first, last = max(start, begin), min(start + len(bits), begin + len(piece))
        if first < last:
            piece[first - begin : last - begin] = bits[first - start : last - start]
        own_bits = piece.to(collective_device())
        if copies.is_divided:
            dist.all_reduce(own_bits, group=copies.shards)
        reference = own_bits.clone()
        dist.broadcast(reference.view(torch.uint8), group=copies.group, group_src=0)
        different = (own_bits != reference).nonzero()
        if not line and len(different):
            at = int(different[0])
            values = [side[at].view(own.dtype).item() for side in (reference, own_bits)]
            ranks = (dist.get_global_rank(copies.group, 0) if copies.group else 0), dist.get_rank()
            sides = (f"{value!r} on rank {rank}" for value, rank in zip(values, ranks, strict=True))
            line = f"{key.partition('/')[2]}, element {begin + at:,}: {' and '.join(sides)}"
    return line
