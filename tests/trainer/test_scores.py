"""Classifiers and reward models from their run files: classes, metrics, checkpoints, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.running import metrics, start, tiny_task, torchrun

CLASSES = ("away", "home", "work")


def classification_task(folder: Path, **sections: Any) -> Path:
    """23 texts of three classes, of which a word tells the class."""
    run_file = tiny_task(folder, **({"objective": {"name": "classification"}} | sections))
    for name, number in (("train.jsonl", 23), ("eval.jsonl", 7)):
        rows = [{"text": f"number {i} is at {CLASSES[i % 3]}", "label": CLASSES[i % 3]} for i in range(number)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_file


def reward_task(folder: Path, **sections: Any) -> Path:
    run_file = tiny_task(folder, **({"objective": {"name": "reward", "center_weight": 0.01}} | sections))
    for name, number in (("train.jsonl", 11), ("eval.jsonl", 5)):
        rows = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "No idea."} for i in range(number)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_file


def change(run_file: Path, **sections: Any) -> None:
    tree = yaml.safe_load(run_file.read_text())
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    run_file.write_text(yaml.safe_dump(tree))


def train(run_file: Path, *overrides: str, ranks: int = 1) -> Any:
    if ranks == 1:
        return start(["ds-finetune", "train", str(run_file), *overrides])
    return start(torchrun("-m", "ds_finetune", "train", str(run_file), *overrides, ranks=ranks))


def test_a_classifier_learns_and_resumes_on_more_ranks(tmp_path: Path) -> None:
    sections = {
        "train": {"for": "4 steps", "global_batch_size": 6, "micro_batch_size": 1},
        "optim": {"lr": 1e-3, "warmup": 0},
    }
    run_file = classification_task(
        tmp_path, eval={"every": "2 steps", "keep_best": True}, checkpoint={"every": "2 steps"}, **sections
    )
    done = train(run_file)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "away, home, work" in done.stdout + done.stderr
    one = metrics(tmp_path)
    assert {"train/accuracy", "train/f1_macro", "train/matthews"} <= set().union(*one)
    assert {"eval/loss", "eval/accuracy", "eval/f1_macro", "eval/matthews"} <= set().union(*one)
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert config["id2label"] == {"0": "away", "1": "home", "2": "work"}
    assert config["architectures"] == ["DeepseekV3ForSequenceClassification"]


def test_a_reward_model_begins_at_ln_2(tmp_path: Path) -> None:
    done = train(reward_task(tmp_path, optim={"warmup": 0}))
    assert done.returncode == 0, done.stderr[-3000:]
    records = metrics(tmp_path)
    assert records[0]["train/loss"] == pytest.approx(0.693147, abs=1e-3)
    assert {"train/reward_margin", "train/reward_accuracy"} <= records[0].keys()
