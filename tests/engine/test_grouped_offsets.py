"""Experts' weights begin at multiples of 16 bytes in DeepSpeed's flat buffers, as torch's grouped product needs on GPUs
(torch 2.13, native/GroupedMMUtils.h). CPUs do not check it.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.state.parameter_tags import parameter_groups
from ds_finetune.families.configs import COMPRESSED
from ds_finetune.families.table import FAMILIES
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.model.tiny import CONFIGS

MODELS: dict[str, dict[str, Any]] = {**CONFIGS, "deepseek_v4": COMPRESSED}
RUN = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o", "train": {"global_batch_size": 1}}


@pytest.mark.parametrize("heads", [4, 5], ids=["even", "odd"])
@pytest.mark.parametrize("family", [name for name in MODELS if FAMILIES[name].expert_keys is not None])
def test_weights_of_experts_are_aligned(family: str, heads: int) -> None:
    """With any number of heads on a rank, which is that of numbers in gpt_oss' sinks."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 8} if family == "gpt_oss" else {}
    config = AutoConfig.for_model(FAMILIES[family].built_as or family, **MODELS[family] | changes)
    lm = build_skeleton(config, attention="sdpa", dtype=torch.bfloat16, device="cpu")
    stage = {"deepspeed": {"zero_optimization": {"stage": 1}}}
    plan = make_plan(RunSettings.of(RunConfig.model_validate(RUN | stage)), world=World(0, 1, 0, 1, "a"), device="cuda")
    names = {param: name for name, param in lm.named_parameters()}
    found = 0
    for group in parameter_groups(lm, plan, Groups(None, None, None, None, None)):
        begin = 0
        for param in group["params"]:
            if ".experts." in names[param] and param.ndim == 3:
                assert begin * param.element_size() % 16 == 0, names[param]
                found += 1
            begin += param.numel()
    assert found
