"""What gpt_oss is not trained with is refused by name."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.state.parameter_tags import parameter_groups
from ds_finetune.errors import FinetuneError
from ds_finetune.families.configs import GPT_OSS
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell, hf_config, run_tree
from ds_finetune.trainer.resolve import plan_model
from tests.checking import check, settings_of

ALONE = Mesh(0, 1)
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
        plan_model(CONFIG, RunSettings.of(_run(model={"path": "none", "attention": attention})))
    assert caught.value.hint == "set model.attention: sdpa"


def _check(mesh: Mesh = ALONE, **sections: Any) -> None:
    run = settings_of(_run(**sections), mesh=mesh, model_json=CONFIG.to_dict())
    check(run, "sizes of the model", "experts of the model")


def test_muon() -> None:
    with pytest.raises(FinetuneError, match=r"optim\.name Muon of model_type gpt_oss would orthogonalise the biases"):
        _check(optim={"name": "Muon"})
    _check(optim={"name": "AdamW"})


@pytest.mark.parametrize(
    ("mesh", "what"), [(Mesh(0, 1, tp=4), "tp 4 does not divide the 2 key"), (Mesh(0, 1, ep=3), "8 routed experts")]
)
def test_sizes_that_do_not_divide(mesh: Mesh, what: str) -> None:
    with pytest.raises(FinetuneError, match=re.escape(what)):
        _check(mesh)


def test_weights_of_experts_decay_and_their_biases_do_not() -> None:
    """Biases are one matrix [experts, outputs] of a layer."""
    lm = build_skeleton(
        AutoConfig.for_model("gpt_oss", **GPT_OSS), attention="sdpa", dtype=torch.float32, device="meta"
    )
    plan = SimpleNamespace(optim=SimpleNamespace(weight_decay=0.1), zero_stage=3)
    groups: Any = SimpleNamespace(experts=None)
    names = {id(param): name for name, param in lm.named_parameters()}
    decayed, others = parameter_groups(lm, plan, groups)  # type: ignore[arg-type]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {names[id(param)].rpartition(".")[2] for param in others["params"]} == {
        *("bias", "sinks", "gate_up_proj_bias", "down_proj_bias"),
        "weight",
    }
    assert all("norm" in names[id(p)] for p in others["params"] if names[id(p)].endswith("weight"))
    assert len(decayed["params"]) + len(others["params"]) == len(names)


@pytest.mark.parametrize("family", TINY_MODELS)
def test_weights_of_experts_begin_at_multiples_of_16_bytes_in_flat_buffers(family: str) -> None:
    """ZeRO-1 and 2 turn weights into parts of one tensor a group, and torch's product of all experts refuses others.
    Sinks, norms and biases, which may have any size, are in a group without such weights.
    """
    lm = build_meta_model(hf_config(family))
    for param in lm.parameters():
        param.requires_grad_()
    plan = SimpleNamespace(optim=SimpleNamespace(weight_decay=0.1), zero_stage=1)
    groups: Any = SimpleNamespace(experts=None)
    for group in parameter_groups(lm, plan, groups):  # type: ignore[arg-type]
        offset = 0
        for param in group["params"]:
            assert param.dim() < 3 or offset % 8 == 0, family
            offset += param.numel()
