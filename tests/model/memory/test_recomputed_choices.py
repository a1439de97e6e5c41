"""Experts are chosen once: where recomputation differs from forward by a rounding, so do gradients, and no more."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finetune.families.configs import COMPRESSED, GROUPED_ROUTING, QWEN3_MOE
from tests.conftest import ROOT
from tests.model.memory.noisy_recomputation import LARGE, LAYERS, SMALL, TOKENS, errors_of, model_of
from tests.model.test_experts import WITH_EXPERTS
from tests.model.tiny import CONFIGS
from tests.rounding import rounding
from tests.running import start, torchrun

MODELS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, CONFIGS[name]) for name in WITH_EXPERTS}
MODELS["deepseek_v2 in groups"] = "deepseek_v2", GROUPED_ROUTING | {"topk_method": "group_limited_greedy"}
MODELS["deepseek_v4"] = "deepseek_v4", COMPRESSED
# No routers of the table: whatever chooses within a layer.
_SHARED = {"shared_expert_intermediate_size": 16, "num_local_experts": 4}
MODELS |= {name: (name, QWEN3_MOE | _SHARED) for name in ("qwen2_moe", "granitemoe")}


def _check(large: float, small: float, where: str) -> None:
    """Where experts are kept, an error grows as the noise does, but for terms of second order: each of two disturbed
    inputs of a layer changes what the others do by its own size. A token with other experts is an error of any noise.
    """
    limit = 2 * LAYERS * LARGE * small + rounding(1.0, LAYERS * TOKENS) / SMALL
    assert abs(large - small) < limit, where
    # Recomputation was disturbed.
    assert small > torch.finfo(torch.float32).eps / SMALL, where


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_experts_are_those_of_forward(name: str) -> None:
    for recomputation, (large, small) in errors_of(partial(model_of, *MODELS[name])).items():
        _check(large, small, where=recomputation)


def test_ranks_that_share_experts_exchange_what_they_did_in_forward() -> None:
    worker = Path(__file__).with_name("noisy_recomputation.py")
    done = start(torchrun(str(worker)), {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    assert len(lines) == 8, done.stdout
    for line in lines:
        _check(*map(float, line.split()[-2:]), where=line)
