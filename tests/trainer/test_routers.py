"""A whole run with policies of routers: metrics, evaluation, plan and export."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.running import metrics, start, tiny_task

ROUTER = {"balance": 0.01, "bias_update": 0.001}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_a_run_balances_its_experts(tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path, router=ROUTER, train={"precision": "bf16"})
    done = start(["ds-finetune", "train", str(run_file)])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "trained in 1 layer, which sends a token to 2 of 4 experts, plus 0.01 x their balance loss" in done.stdout
    records = metrics(tmp_path)
    assert all(0.9 < record["train/balance_loss"] < 4 for record in records)
    assert records[-1]["eval/balance_loss"] == pytest.approx(records[-1]["train/balance_loss"], rel=0.3)
    folder = tmp_path / "run" / "export"
    files = (
        set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
        if (folder / "model.safetensors.index.json").exists()
        else {"model.safetensors"}
    )
    for name in files:
        with safe_open(folder / name, "pt") as tensors:
            if BIAS in tensors.keys():  # noqa: SIM118
                bias = tensors.get_tensor(BIAS)
    assert bias.dtype == torch.float32
    steps = torch.round(bias / 0.001)
    assert torch.allclose(bias, steps * 0.001, atol=1e-7)
    assert steps.abs().max() in (1, 2, 3)


def test_routers_of_a_dense_model_are_refused(tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path, router={"train": False})
    tree = json.loads((tmp_path / "model" / "config.json").read_text()) | {"first_k_dense_replace": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(tree))
    done = start(["ds-finetune", "train", str(run_file)])
    assert done.returncode == 2
    assert "`router` (train False) with model_type deepseek_v3, which has no routed experts" in done.stderr
