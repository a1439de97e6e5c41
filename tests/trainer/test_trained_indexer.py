"""Runs that train indexers: what they print, their metrics, resume and exports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ds_finetune import read_config, train
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.reference.selftest.cells import TINY_MODELS
from tests.running import metrics, start, tiny_task, torchrun

LEARNING = {"lr": 1e-2, "warmup": "0%", "min_lr_ratio": 1.0, "weight_decay": 0.1}


def _run_file(folder: Path, **sections: Any) -> Path:
    run_file = tiny_task(
        folder,
        **{
            "optim": LEARNING,
            "model": {"weights": "load"},
            "indexer": {"train": True},
            "train": {"for": "4 steps"},
            "eval": {"every": "2 steps"},
            "data": {"packing": True},
        }
        | sections,
    )
    vocabulary = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    torch.manual_seed(31)
    config = AutoConfig.for_model(**TINY_MODELS["deepseek_v32_sparse"] | {"vocab_size": vocabulary})
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / "model")
    return run_file


def test_warmup_trains_indexers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(read_config(_run_file(tmp_path, indexer={"train": True, "stage": "dense_warmup"})))
    printed = " ".join(capsys.readouterr().out.split())
    assert "trained alone, by attention to all earlier tokens" in printed
    before, after = load_file(tmp_path / "model" / "model.safetensors"), _exported(tmp_path)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".self_attn.indexer." in name}
    found = metrics(tmp_path)
    assert found[-1]["train/indexer_loss"] < found[0]["train/indexer_loss"]
    assert found[-1]["eval/indexer_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sparse", "dense_warmup"])
def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(stage: str, tmp_path: Path) -> None:
    section = {"train": True, "stage": stage}
    wanted, resumed = (_run_file(tmp_path / name, indexer=section) for name in ("wanted", "resumed"))
    train(read_config(wanted))
    train(read_config(resumed, ["train.for=2 steps", "export.at_end=false"]))
    done = start(torchrun("ds_finetune/train.py", str(resumed), "deepspeed.zero_optimization.stage=3"))
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("train/loss", "train/indexer_loss", "train/grad_norm"):
        found = [[each[name] for each in metrics(tmp_path / folder)] for folder in ("wanted", "resumed")]
        assert found[1] == pytest.approx(found[0], rel=1e-4), name
    after, again = _exported(tmp_path / "wanted"), _exported(tmp_path / "resumed")
    assert all(torch.allclose(after[name], again[name], atol=1e-5) for name in after)


def _exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "export" / "model.safetensors")
