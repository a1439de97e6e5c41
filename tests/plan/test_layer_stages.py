"""Which layers pipeline ranks hold."""

import itertools
import random

import pytest

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.configs import DENSE
from ds_finetune.plan.layer_stages import StageLayers, balance_layers, check_trained_stages, stages_of
from ds_finetune.plan.model_tensors import FullTensor
from tests.described import described_tree


def test_the_largest_part_is_as_small_as_can_be() -> None:
    rng = random.Random(3)
    for _ in range(40):
        weights = [rng.randint(1, 30) for _ in range(rng.randint(3, 9))]
        parts = rng.randint(1, len(weights))
        found = balance_layers(tuple(weights), parts)
        assert [layer for part in found for layer in part] == list(range(len(weights)))
        assert all(len(part) for part in found)
        cuts = ((0, *inner, len(weights)) for inner in itertools.combinations(range(1, len(weights)), parts - 1))
        best = min(max(sum(weights[first:last]) for first, last in itertools.pairwise(cut)) for cut in cuts)
        assert max(sum(weights[layer] for layer in part) for part in found) == best


def test_chunks_go_around_the_ranks() -> None:
    tensors = described_tree({"model_type": "llama", **DENSE, "num_hidden_layers": 8}).tensors
    assert stages_of(tensors, ParallelConfig()) == (None,)
    assert stages_of(tensors, ParallelConfig(pp=2)) == (StageLayers((range(4),)), StageLayers((range(4, 8),)))
    first, last = stages_of(tensors, ParallelConfig(pp=2, vpp=2))
    assert first == StageLayers((range(2), range(4, 6)))
    assert last == StageLayers((range(2, 4), range(6, 8)))
    assert last is not None
    assert (str(last), list(last), 5 in last, 7 in last) == ("2 to 3 and 6 to 7", [2, 3, 6, 7], False, True)
    given = ParallelConfig(pp=2, vpp=2, pp_layers=(3, 2, 2, 1))
    assert [str(part) for part in stages_of(tensors, given)] == ["0 to 2 and 5 to 6", "3 to 4 and 7 to 7"]


@pytest.mark.parametrize(
    ("names", "ep", "said"),
    [
        (["lm_head.weight"], 1, r"selects no matrices in stage 0 of parallel.pp 2 \(layers 0 to 1\)"),
        (["model.embed_tokens.weight"], 1, "no matrices in stage 1"),
        (["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"], 1, "no vectors in stage 0"),
        (["model.layers.0.mlp.experts.down_proj", "lm_head.weight"], 2, "no matrices in stage 0"),
        (["model.layers.0.mlp.experts.down_proj", "lm_head.weight"], 1, ""),
        (["model.embed_tokens.weight", "lm_head.weight"], 1, ""),
        (["model.layers.1.norm.weight", "model.norm.weight"], 2, ""),
    ],
)
def test_stages_train_the_same_kinds_of_tensors(names: list[str], ep: int, said: str) -> None:
    """Otherwise ranks of stages with other groups of the optimizer wait for each other in the norm."""
    tensors = {name: FullTensor((4,) if "norm" in name else (4, 4), is_routed="experts" in name) for name in names}
    stages = (StageLayers((range(2),)), StageLayers((range(2, 4),)))
    if not said:
        check_trained_stages(tensors, stages, ep_size=ep, given="a key")
        return
    with pytest.raises(ConfigError, match=said):
        check_trained_stages(tensors, stages, ep_size=ep, given="a key")
