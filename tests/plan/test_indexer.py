"""Which indexers a run trains, and the settings with which it is refused to train them."""

from dataclasses import replace
from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import IndexerConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.configs import SHARED_INDEX
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.settings import RunSettings
from ds_finetune.plan.trained_parts import plan_indexer
from tests.checking import check, settings_of

V32 = {"model_type": "deepseek_v32", "num_hidden_layers": 3}
GLM = {"model_type": "glm_moe_dsa", **SHARED_INDEX, "num_hidden_layers": 4}
WARMUP = {"train": True, "stage": "dense_warmup"}


def _config(**sections: Any) -> RunConfig:
    tree = {"model": "m", "data": {"train": "a.jsonl"}, "output_dir": "out", "indexer": {"train": True}}
    return RunConfig.model_validate(tree | {"train": {"precision": "fp32"}} | sections)


def test_layers_with_indexers_are_trained() -> None:
    assert plan_indexer(IndexerConfig(), V32) is None
    plan = plan_indexer(IndexerConfig(train=True), V32)
    assert plan is not None
    assert (plan.layers, plan.trains_only_indexers) == ((0, 1, 2), False)
    assert plan.lines() == [
        (
            "indexers",
            "3, trained by attention to the tokens they choose; plus 1 x their divergence, a mean over the tokens of "
            "the global batch",
        )
    ]
    alone = plan_indexer(IndexerConfig.model_validate(WARMUP), GLM)
    assert alone is not None
    assert (alone.layers, alone.trains_only_indexers) == ((0, 2), True)
    assert "alone, by attention to all earlier tokens" in alone.lines()[0][1]


def test_a_model_without_indexers_is_refused() -> None:
    with pytest.raises(ConfigError, match="with model_type deepseek_v3, whose") as caught:
        check(settings_of(_config(), model_json={"model_type": "deepseek_v3"}), "type of the model")
    assert "deepseek_v32, glm_moe_dsa" in caught.value.hint


def test_a_stage_begins_with_an_indexer() -> None:
    run = settings_of(_config(parallel={"pp": 2}), model_json=GLM)
    check(replace(run, stages=(StageLayers((range(2),)), StageLayers((range(2, 4),)))), "stages")
    check(replace(run, stages=(None,)), "stages")
    with pytest.raises(ConfigError, match="stage 1 begins with layer 1, which has no indexer") as caught:
        check(replace(run, stages=(StageLayers((range(1),)), StageLayers((range(1, 4),)))), "stages")
    assert "one of layers 0, 2" in caught.value.hint


@pytest.mark.parametrize(
    ("sections", "mesh", "stage", "words"),
    [
        ({"lora": {"rank": 4}}, {}, 1, "with lora is"),
        ({"objective": "dpo"}, {}, 1, "with objective dpo is"),
        ({"optim": {"name": "Muon"}}, {}, 1, "with optim.name Muon is"),
        ({"model": {"path": "m", "attention": "eager"}}, {}, 1, "with model.attention eager is"),
        ({"train": {"precision": "fp16"}}, {}, 1, "with train.precision fp16 is"),
        ({"train": {"precision": "bf16"}}, {}, 0, "with zero stage 0 in bf16 is"),
        ({"indexer": WARMUP}, {"pp": 2}, 1, "(stage dense_warmup) with parallel dp 2 x pp 2"),
        ({"indexer": WARMUP}, {"ep": 2}, 1, "(stage dense_warmup) with parallel"),
        ({"indexer": WARMUP, "router": {"train": False}}, {}, 1, "(stage dense_warmup) with `router` is"),
    ],
)
def test_what_no_test_compares_is_refused(
    sections: dict[str, Any], mesh: dict[str, int], stage: int, words: str
) -> None:
    tree = {"zero_optimization": {"stage": stage}}
    run = RunSettings.of(_config(**sections), mesh=Mesh(0, 2, **mesh), deepspeed_config=tree)
    with pytest.raises(ConfigError) as caught:
        check(run, "indexers")
    assert words in caught.value.message
    assert caught.value.message.endswith("is not tested")


def test_offload_to_nvme_is_refused() -> None:
    tree = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    with pytest.raises(ConfigError, match="with offload to nvme is not tested"):
        check(RunSettings.of(_config(), deepspeed_config=tree), "indexers")
