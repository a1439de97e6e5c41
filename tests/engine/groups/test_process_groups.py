"""How many process groups a layout opens; none of them communicates."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.engine.groups.process_groups import open_groups
from ds_finetune.plan.mesh import Mesh

RANKS = 8


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The ranks of each group that is made, in a world of eight ranks of which this process is one."""
    made: list[tuple[int, ...]] = []
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    plain = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda ranks, **given: made.append(tuple(ranks)) or plain(ranks, **given))
    yield made
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("sizes", "shares_embedding", "number"),
    [
        ({}, False, 0),
        ({"sp": 2}, False, 4),
        ({"sp": 8}, False, 1),
        # Of tensor parallel ranks and of ranks with the same part; the former are also those that hold a model.
        ({"tp": 2}, False, 4 + 2),
        ({"tp": 8}, False, 1 + 8),
        ({"pp": 2}, False, 4 + 2),
        # First and last stage with all their copies: of two stages all ranks, of four half of them.
        ({"pp": 2}, True, 4 + 2 + 1),
        ({"pp": 4}, False, 2 + 4),
        ({"pp": 4}, True, 2 + 4 + 1),
        ({"pp": 8}, True, 1 + 8 + 1),
        # Hidden states and gradients, between neighbours and around the end, for each pipeline.
        ({"pp": 2, "vpp": 2}, False, 4 + 2 + 4 * 4),
        # Stages, shards, parts of a model, and copies of each part.
        ({"pp": 2, "tp": 2}, False, 4 + 4 + 2 + 4),
        # Experts exchange rows beside other collectives of the same ranks.
        ({"ep": 8}, False, 1 + 8),
        ({"ep": 2, "tp": 2}, False, 4 + 4 + 4 + 2),
    ],
)
def test_groups_of_the_same_ranks_are_opened_once(
    opened: list[tuple[int, ...]], sizes: dict[str, int], shares_embedding: bool, number: int
) -> None:
    mesh = Mesh.of(ParallelConfig(**sizes), world_size=RANKS, rank=1)
    with open_groups(mesh, shares_embedding=shares_embedding, vpp=sizes.get("vpp", 1)) as groups:
        assert len(opened) == number
        # With the default group, and DeepSpeed's copy of it; the planner leaves the group of the embedding out.
        is_shared = groups.stage is not None and groups.stage.embedding_group is not None
        known = 1 + (groups.mpu is None) + sum(1 in ranks for ranks in opened) - is_shared
        assert mesh.num_groups(vpp=sizes.get("vpp", 1)) == known
        if mesh.tp > 1 and mesh.pp == 1:
            assert groups.tensor is not None
            assert groups.mpu is not None
            assert groups.mpu.get_model_parallel_group() is groups.tensor.group
        if groups.stage is not None:
            assert (groups.stage.embedding_group is not None) == (shares_embedding and groups.stage.is_end)
