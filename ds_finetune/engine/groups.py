"""Process groups of a mesh."""

import torch.distributed as dist

from ds_finetune.engine.processes import COLLECTIVE_TIMEOUT
from ds_finetune.model.sequence import SequenceGroup
from ds_finetune.plan.mesh import Axis, Mesh


def sequence_group(mesh: Mesh) -> SequenceGroup | None:
    """The ranks that share this rank's rows by tokens, None where there is one; collective."""
    return SequenceGroup(_line(mesh, "sp"), mesh.sp, mesh.place("sp")) if mesh.sp > 1 else None


def _line(mesh: Mesh, *axes: Axis) -> dist.ProcessGroup:
    """The group of this rank along `axes`; every rank makes every group."""
    made = [(ranks, dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT)) for ranks in mesh.lines(*axes)]
    return next(group for ranks, group in made if mesh.rank in ranks)
