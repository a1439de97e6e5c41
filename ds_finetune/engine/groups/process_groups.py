"""The process groups of a device mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ds_finetune.engine.groups.default_group import COLLECTIVE_TIMEOUT
from ds_finetune.engine.patches.deepspeed_init import (
    forget_model_parallel_unit,
    register_expert_groups,
    unregister_expert_groups,
)
from ds_finetune.model.parallel.expert import ExpertParallelGroup
from ds_finetune.model.parallel.pipeline import Link, PipelineGroup
from ds_finetune.model.parallel.sequence import SequenceParallelGroup
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.plan.mesh import Axis, Mesh


class ModelParallel:
    """The model parallel unit (`mpu`), which gives DeepSpeed two process groups of this rank: the ranks that together
    have the whole model, and the ranks that have the same shard of the model.
    """

    def __init__(self, pool: "_GroupMaker") -> None:
        self._mesh = pool.mesh
        self._model: dist.ProcessGroup | None = pool.along("pp", "tp")
        self._data: dist.ProcessGroup | None = pool.along("dp", "sp")

    def close(self) -> None:
        """Release the process groups, even if this object is still referenced."""
        forget_model_parallel_unit()
        self._model = self._data = None

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks that together have the whole model."""
        return self._model

    def get_model_parallel_rank(self) -> int:
        """This rank's tensor parallel rank. In gradient norms, only rank 0 counts parameters that are not sharded."""
        return self._mesh.coordinate("tp")

    def get_model_parallel_world_size(self) -> int:
        """Number of shards of the model: pipeline stages x tensor parallel ranks."""
        return self._mesh.pp * self._mesh.tp

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks that have the same shard of the model."""
        return self._data

    def get_data_parallel_rank(self) -> int:
        """This rank's index in the data parallel group."""
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks in the data parallel group."""
        return self._mesh.dp * self._mesh.sp


@dataclass(frozen=True)
class Groups:
    """This rank's process groups, None for unused kinds. DeepSpeed looks up `same_experts` by `expert_name`."""

    stage: PipelineGroup | None
    sequence: SequenceParallelGroup | None
    tensor: TensorParallelGroup | None
    experts: ExpertParallelGroup | None
    mpu: ModelParallel | None
    same_experts: dist.ProcessGroup | None = None

    @property
    def expert_name(self) -> str:
        """Name under which DeepSpeed looks up the process groups of experts."""
        return f"ep_size_{self.experts.size if self.experts else 1}"

    @property
    def same_shard(self) -> dist.ProcessGroup | None:
        """Process group of the ranks with the same shard of all parameters except experts; None means all ranks."""
        return self.mpu.get_data_parallel_group() if self.mpu else None


class _GroupMaker:
    """Creates and destroys the process groups of a mesh. Each group costs threads (gloo) or a communicator (NCCL)."""

    def __init__(self, mesh: Mesh, timeout: timedelta) -> None:
        self.mesh = mesh
        self._timeout = timeout
        self._groups: list[dist.ProcessGroup] = []
        self._by_ranks: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def along(self, *axes: Axis) -> dist.ProcessGroup:
        return self.shared(self.mesh.groups(*axes))

    def shared(self, rank_lists: list[list[int]]) -> dist.ProcessGroup:
        """Return this rank's process group among those of `rank_lists`. Equal lists get the same groups."""
        ranks = tuple(map(tuple, rank_lists))
        if ranks not in self._by_ranks:
            self._by_ranks[ranks] = self.own(rank_lists)
        return self._by_ranks[ranks]

    def own(self, rank_lists: list[list[int]]) -> dist.ProcessGroup:
        """Create a new group for each list of ranks, collectively, and return this rank's group. It is for collectives
        that overlap with collectives of another group of the same ranks.
        """
        new_groups = [(ranks, dist.new_group(ranks, timeout=self._timeout)) for ranks in rank_lists]
        self._groups += [group for ranks, group in new_groups if self.mesh.rank in ranks]
        return self._groups[-1]

    def destroy(self) -> None:
        self._by_ranks.clear()
        while self._groups:
            dist.destroy_process_group(self._groups.pop())


@contextmanager
def open_groups(
    mesh: Mesh, *, shares_embedding: bool = False, vpp: int = 1, timeout: timedelta = COLLECTIVE_TIMEOUT
) -> Iterator[Groups]:
    """Context with the process groups of `mesh`, which are created collectively and destroyed at the end. With
    `shares_embedding` the first and last pipeline stage share a group, because both have the embedding. With more than
    one chunk per rank (`vpp`), pipelines have a group for each direction of messages (`Link`). The groups
    are destroyed explicitly, because DeepSpeed 0.19.8 keeps a ZeRO-3 model, and with it the groups, after `destroy`.
    """
    pool = _GroupMaker(mesh, timeout)
    groups = Groups(
        stage=_stage(pool, shares_embedding=shares_embedding, vpp=vpp) if mesh.pp > 1 else None,
        sequence=SequenceParallelGroup(pool.along("sp"), mesh.sp, mesh.coordinate("sp")) if mesh.sp > 1 else None,
        tensor=TensorParallelGroup(pool.along("tp"), mesh.tp, mesh.coordinate("tp")) if mesh.tp > 1 else None,
        experts=ExpertParallelGroup(pool.own(mesh.expert_groups()), mesh.ep, mesh.expert_index)
        if mesh.ep > 1
        else None,
        mpu=ModelParallel(pool) if mesh.tp * mesh.pp > 1 else None,
        same_experts=pool.own(mesh.same_expert_groups()) if mesh.ep > 1 else None,
    )
    if groups.experts is not None:
        register_expert_groups(
            groups.expert_name,
            parts=(groups.experts.group, mesh.expert_groups()),
            same_shard=(groups.same_experts, mesh.same_expert_groups()),
        )
    yield groups
    # Groups are not destroyed after an error, because that would wait for ranks that may have ended.
    for part in (groups.stage, groups.sequence, groups.tensor, groups.experts, groups.mpu):
        if part is not None:
            part.close()
    if groups.experts is not None:
        unregister_expert_groups(groups.expert_name)
    pool.destroy()


def _stage(pool: _GroupMaker, *, shares_embedding: bool, vpp: int) -> PipelineGroup:
    mesh = pool.mesh
    stage = PipelineGroup(pool.along("pp"), mesh.pp, mesh.coordinate("pp"))
    stage.num_chunks = vpp
    if vpp > 1:
        ways = (Link(is_forward, wraps) for is_forward in (True, False) for wraps in (True, False))
        stage.links = {way: pool.own(mesh.groups("pp")) for way in ways}
    if shares_embedding:
        ends = [
            [rank for rank in line if mesh.coordinate("pp", rank) in (0, mesh.pp - 1)]
            for line in mesh.groups("pp", "dp", "sp")
        ]
        group = pool.shared(ends)
        stage.embedding_group = group if stage.is_end else None
        stage.adds_embedding = mesh.coordinate("dp") == mesh.coordinate("sp") == 0
    return stage
