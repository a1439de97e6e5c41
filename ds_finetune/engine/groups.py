"""Process groups of a mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from ds_finetune.engine.processes import COLLECTIVE_TIMEOUT
from ds_finetune.model.experts import ExpertGroup
from ds_finetune.model.sequence import SequenceGroup
from ds_finetune.model.stages import StageGroup
from ds_finetune.model.tensor import TensorGroup
from ds_finetune.plan.mesh import Axis, Mesh


class ModelParallel:
    """What DeepSpeed asks a model parallel unit (`mpu`) for: who holds other parts of the model, and who the same."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._model, self._data = _line(mesh, "pp", "tp"), _line(mesh, "dp", "sp")

    def close(self) -> None:
        """Let go of the process groups, whatever still refers to this; DeepSpeed 0.19.8 keeps the last unit (utils/groups.py:50)."""
        from deepspeed.utils import groups

        groups.mpu = None
        self._model = self._data = None

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that together hold the model."""
        return self._model

    def get_model_parallel_rank(self) -> int:
        """This rank's part of its stage: parameters that are not cut are counted by those whose part is 0."""
        return self._mesh.place("tp")

    def get_model_parallel_world_size(self) -> int:
        """Parts of the model, of all stages."""
        return self._mesh.pp * self._mesh.tp

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the model."""
        return self._data

    def get_data_parallel_rank(self) -> int:
        """This rank's number among them."""
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        """How many they are."""
        return self._mesh.dp * self._mesh.sp


@dataclass(frozen=True)
class Groups:
    """The groups this rank is in; None along an axis of one rank. `same_experts` is known to DeepSpeed by `expert_name`."""

    stage: StageGroup | None
    sequence: SequenceGroup | None
    tensor: TensorGroup | None
    experts: ExpertGroup | None
    mpu: ModelParallel | None
    same_experts: dist.ProcessGroup | None = None

    @property
    def expert_name(self) -> str:
        """Name under which DeepSpeed finds the groups of experts."""
        return f"ep_size_{self.experts.size if self.experts else 1}"

    @property
    def same_part(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of what is no expert; None for all ranks."""
        return self.mpu.get_data_parallel_group() if self.mpu else None


@contextmanager
def open_groups(mesh: Mesh) -> Iterator[Groups]:
    """Make the groups of `mesh`, collectively, and let go of them at the end: DeepSpeed 0.19.8 keeps a model under ZeRO-3 past `destroy`."""
    groups = Groups(
        stage=StageGroup(_line(mesh, "pp"), mesh.pp, mesh.place("pp")) if mesh.pp > 1 else None,
        sequence=SequenceGroup(_line(mesh, "sp"), mesh.sp, mesh.place("sp")) if mesh.sp > 1 else None,
        tensor=TensorGroup(_line(mesh, "tp"), mesh.tp, mesh.place("tp")) if mesh.tp > 1 else None,
        experts=ExpertGroup(_own(mesh.rank, mesh.expert_lines()), mesh.ep, mesh.expert_place) if mesh.ep > 1 else None,
        mpu=ModelParallel(mesh) if mesh.tp * mesh.pp > 1 else None,
        same_experts=_own(mesh.rank, mesh.same_expert_lines()) if mesh.ep > 1 else None,
    )
    _tell_deepspeed(groups, mesh)
    try:
        yield groups
    finally:
        for part in (groups.stage, groups.sequence, groups.tensor, groups.experts, groups.mpu):
            if part is not None:
                part.close()


def _tell_deepspeed(groups: Groups, mesh: Mesh) -> None:
    """Register the groups of experts where DeepSpeed 0.19.8 looks for them by name (utils/groups.py:37-44)."""
    from deepspeed.utils import groups as known

    if groups.experts is None:
        return
    name = groups.expert_name
    # Asked for to add up norms alone, for which tensor parallel ranks hold parts of experts as well (zero/stage3.py:1995).
    parts = groups.experts.group if mesh.tp == 1 else _own(mesh.rank, mesh.expert_part_lines())
    known._EXPERT_PARALLEL_GROUP[name], known._EXPERT_PARALLEL_GROUP_RANKS[name] = parts, mesh.expert_part_lines()
    known._EXPERT_DATA_PARALLEL_GROUP[name], known._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = groups.same_experts, mesh.same_expert_lines()


def _line(mesh: Mesh, *axes: Axis) -> dist.ProcessGroup | None:
    """The group of this rank along `axes`."""
    return _own(mesh.rank, mesh.lines(*axes))


def _own(rank: int, lines: list[list[int]]) -> dist.ProcessGroup | None:
    """The group of this rank; every rank makes every group."""
    made = [(ranks, dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT)) for ranks in lines]
    return next(group for ranks, group in made if rank in ranks)
