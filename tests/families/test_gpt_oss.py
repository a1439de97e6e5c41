"""What gpt_oss is not trained with is refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import FinetuneError
from ds_finetune.families.tiny import GPT_OSS
from ds_finetune.model.model_plan import plan_model
from ds_finetune.plan.combinations import check_divides, check_optimizer
from ds_finetune.plan.mesh import Mesh
from ds_finetune.selftest.cells import Cell, run_tree

CONFIG: Any = AutoConfig.for_model("gpt_oss", **GPT_OSS)


def _run(**sections: Any) -> RunConfig:
    tree = run_tree(Cell("gpt_oss", 1, 1, packing=True), Path("none"), Path("out"), dp=1)
    return RunConfig.model_validate(tree | sections)


@pytest.mark.parametrize(
    ("attention", "said"),
    [("eager", "documents of a packed row would see each other"), ("flash_attention_2", "its kernels have none")],
)
def test_attention_without_sinks(attention: str, said: str) -> None:
    with pytest.raises(
        FinetuneError, match=f"model.attention {attention} .* whose attention has sinks: {said}"
    ) as caught:
        plan_model(CONFIG, _run(model={"path": "none", "attention": attention}))
    assert caught.value.hint == "set model.attention: sdpa"


def test_lora() -> None:
    with pytest.raises(FinetuneError, match="lora of model_type gpt_oss is not tested"):
        plan_model(CONFIG, _run(lora={"rank": 2}))


def test_muon() -> None:
    with pytest.raises(FinetuneError, match=r"optim\.name Muon of model_type gpt_oss would orthogonalise the biases"):
        check_optimizer("Muon", CONFIG.to_dict())
    check_optimizer("AdamW", CONFIG.to_dict())
    check_optimizer("Muon", {"model_type": "deepseek_v3"})


@pytest.mark.parametrize(
    ("mesh", "what"), [(Mesh(0, 1, tp=4), "tp 4 does not divide the 2 key"), (Mesh(0, 1, ep=3), "8 routed experts")]
)
def test_sizes_that_do_not_divide(mesh: Mesh, what: str) -> None:
    with pytest.raises(FinetuneError, match=re.escape(what)):
        check_divides(mesh, CONFIG.to_dict())
