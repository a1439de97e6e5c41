"""Groups of ranks by arithmetic against those of the mesh, and what is sent in them."""

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.plan.estimate.operations import RowShape, Work
from ds_finetune.plan.estimate.rank_weights import weights_of_run
from ds_finetune.plan.estimate.traffic import Group, RankGroups, traffic
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.model.tiny import CONFIGS

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


def test_four_bits_are_gathered_as_bytes_of_two_numbers() -> None:
    model, found = CONFIGS["qwen3"] | {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 2048}, []
    for quantize in (None, "nf4"):
        tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "lora": {"rank": 8, "quantize": quantize}}
        tree |= {"deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100_000}}}
        config = RunConfig.model_validate(tree | {"train": {"global_batch_size": 2, "max_seq_len": 64}})
        plan = make_plan(RunSettings.of(config), world=World(0, 2, 0, 2, "a test"), device="cuda")
        work = Work(plan, model, RowShape.full(64))
        (weights,) = weights_of_run(plan, model)
        found.append(next(each for each in traffic(work, weights, stage=0) if each.name == "gathered weights"))
        large = [kind for kind in weights.kinds if ".layers." in kind.name and len(kind.local) > 1]
    numel = sum(kind.numel for kind in large if kind.numel // kind.count > 200_000)
    # Half of what two ranks hold is sent, of 2 bytes a number and of half a byte.
    assert found[0].num_bytes - found[1].num_bytes == numel * (2 - 0.5) / 2
