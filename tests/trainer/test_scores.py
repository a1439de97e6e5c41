"""Classifiers and reward models from their run files: classes, metrics, checkpoints, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.api import plan_run
from ds_finetune.config.schema import read_config
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.system.world import World
from ds_finetune.trainer.inputs import check_padding
from ds_finetune.trainer.prepare import PreparedRun, prepare_run
from ds_finetune.trainer.resolve import resolve_here
from tests.running import metrics, start, tiny_task, torchrun

CLASSES = ("away", "home", "work")


def classification_task(folder: Path, **sections: Any) -> Path:
    """23 texts of three classes, of which a word tells the class."""
    run_file = tiny_task(folder, **({"objective": {"name": "classification"}} | sections))
    tree = yaml.safe_load(run_file.read_text())
    tree["optim"].pop("min_lr_ratio")
    tree["model"] = str(folder / "model")
    save_weights(folder / "model")
    run_file.write_text(yaml.safe_dump(tree))
    for name, number in (("train.jsonl", 23), ("eval.jsonl", 7)):
        rows = [{"text": f"number {i} is at {CLASSES[i % 3]}", "label": CLASSES[i % 3]} for i in range(number)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_file


def save_weights(folder: Path) -> None:
    """Weights of the causal LM that config.json describes."""
    kept = (folder / "config.json").read_text()
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().save_pretrained(folder)
    (folder / "config.json").write_text(kept)


def reward_task(folder: Path, **sections: Any) -> Path:
    run_file = tiny_task(folder, **({"objective": {"name": "reward", "center_weight": 0.01}} | sections))
    for name, number in (("train.jsonl", 11), ("eval.jsonl", 5)):
        rows = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "No idea."} for i in range(number)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_file


def train(run_file: Path, *overrides: str, ranks: int = 1) -> Any:
    if ranks == 1:
        return start(["ds-finetune", "train", str(run_file), *overrides])
    return start(torchrun("-m", "ds_finetune", "train", str(run_file), *overrides, ranks=ranks))


STEPS = {
    "train": {"for": "4 steps", "global_batch_size": 6, "micro_batch_size": 1},
    "optim": {"lr": 1e-2, "warmup": 0, "lr_scheduler": "constant"},
    "eval": {"every": "2 steps", "keep_best": True},
    "checkpoint": {"every": "2 steps"},
}
LORA = {"lora": {"rank": 8, "alpha": 16}}


@pytest.mark.parametrize("lora", [LORA, pytest.param({}, marks=pytest.mark.slow)], ids=["adapters", "all-weights"])
def test_a_classifier_learns_and_resumes_in_another_layout(lora: dict[str, Any], tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder in (straight, stopped):
        folder.mkdir()
        classification_task(folder, **STEPS, **lora)
    done = train(straight / "run.yaml")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "3: away, home, work" in done.stdout
    first = train(stopped / "run.yaml", "train.for=2 steps")
    assert first.returncode == 0, first.stderr[-3000:]
    second = train(stopped / "run.yaml", "deepspeed.zero_optimization.stage=3", "train.global_batch_size=6", ranks=2)
    assert second.returncode == 0, second.stderr[-3000:]
    wanted, found = ({record["step"]: record for record in metrics(folder)} for folder in (straight, stopped))
    for step in range(1, 5):
        names = [name for name in wanted[step] if name.startswith(("train/", "eval/"))]
        assert {name: found[step][name] for name in names} == pytest.approx(
            {name: wanted[step][name] for name in names}, rel=1e-3
        )
    assert {"train/accuracy", "train/f1_macro", "train/matthews"} <= wanted[1].keys()
    assert [found[step]["data/examples"] for step in range(1, 5)] == [6, 6, 6, 6]
    assert "prompts" not in done.stdout
    assert {"eval/loss", "eval/accuracy", "eval/f1_macro", "eval/matthews"} <= wanted[4].keys()
    assert wanted[4]["eval/loss"] < wanted[2]["eval/loss"]


def test_a_reward_model_begins_at_ln_2(tmp_path: Path) -> None:
    done = train(reward_task(tmp_path, optim={"warmup": 0}))
    assert done.returncode == 0, done.stderr[-3000:]
    records = metrics(tmp_path)
    assert records[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert {"train/reward_margin", "train/reward_accuracy"} <= records[0].keys()


def prepare(run_file: Path) -> PreparedRun:
    return prepare_run(resolve_here(read_config(run_file), World(0, 1, 0, 1, "a test")))


def test_classes_and_padding_are_in_the_config_of_the_run(tmp_path: Path) -> None:
    run = prepare(classification_task(tmp_path))
    tree = run.inputs.config_tree
    assert tree["id2label"] == {"0": "away", "1": "home", "2": "work"}
    assert tree["label2id"] == {"away": 0, "home": 1, "work": 2}
    assert tree["architectures"] == ["DeepseekV3ForSequenceClassification"]
    assert tree["problem_type"] == "single_label_classification"
    assert tree["pad_token_id"] not in run.inputs.stop_ids
    assert run.inputs.model.head_outputs == 3


def test_regression_needs_one_label_in_the_run_file(tmp_path: Path) -> None:
    run_file = classification_task(tmp_path, objective={"name": "classification", "num_labels": 1})
    for name in ("train.jsonl", "eval.jsonl"):
        rows = [{"text": f"number {i}", "label": i / 3} for i in range(9)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = prepare(run_file).inputs.config_tree
    assert tree["problem_type"] == "regression"
    assert len(tree["id2label"]) == 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optim": {"name": "Muon"}, "train": {"max_grad_norm": 0}}, "optim.name Muon with objective classification"),
        ({"objective": {"name": "classification", "num_labels": 5}}, "num_labels is 5"),
    ],
)
def test_what_cannot_be_trained_is_refused(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        prepare(classification_task(tmp_path, **sections))


def test_a_document_that_ends_in_the_padding_token_is_refused(tmp_path: Path) -> None:
    run_file = reward_task(tmp_path)
    run = prepare(run_file)
    rows, pad = run.inputs.train, run.model.hf_config.pad_token_id
    assert isinstance(rows, PreparedRows)
    ids = np.array(rows.documents.ids)
    ids[rows.documents.offsets[3] - 1] = pad
    changed = replace(rows, documents=replace(rows.documents, ids=ids))
    with pytest.raises(DataError, match=r"1 documents end in the padding token .* number 2"):
        check_padding(changed, run.inputs.model, run.inputs.tokenizer)


def test_the_plan_without_data_names_scores_and_padding(tmp_path: Path) -> None:
    config = read_config(classification_task(tmp_path, objective={"name": "classification", "labels": ["a", "b"]}))
    lines = dict(plan_run(config, gpus=2).lines)
    assert lines["scores"] == "2: a, b"
    assert "padding token" in lines
