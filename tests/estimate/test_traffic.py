"""RankGroups by arithmetic against those of the mesh."""

import pytest

from ds_finetune.estimate.traffic import Group, RankGroups
from ds_finetune.plan.mesh import Mesh

MESHES = [
    Mesh(0, dp=4, pp=2, sp=2, tp=2, ep=4),
    Mesh(0, dp=8),
    Mesh(0, dp=1, tp=8, pp=4),
    Mesh(0, dp=8, ep=8, tp=2),
    Mesh(0, dp=2, sp=4, ep=2),
]


def ranks_of(group: Group) -> list[int]:
    return [place * group.stride for place in range(group.size)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_groups_are_those_of_the_mesh(mesh: Mesh) -> None:
    found = RankGroups.of(mesh)
    assert ranks_of(found.zero) in mesh.lines("dp", "sp")
    assert ranks_of(found.tensor) in mesh.lines("tp")
    assert ranks_of(found.sequence) in mesh.lines("sp")
    assert ranks_of(found.stages) in mesh.lines("pp")
    assert ranks_of(found.experts) in mesh.expert_lines()
    assert ranks_of(found.same_experts) in mesh.same_expert_lines()


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_on_one_node(mesh: Mesh, per_node: int) -> None:
    for group in RankGroups.of(mesh):
        assert group.on_node(per_node) == sum(rank < per_node for rank in ranks_of(group))
