"""A run compares with the log-probabilities of its reference model, which are computed once and found again."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from ds_finetune import read_config, train
from ds_finetune.config.schema import RunConfig
from tests.running import metrics, start, tiny_task, torchrun

LN_2 = math.log(2)
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Pairs of answers of 40 lengths; so small a learning rate that the weights do not change in bf16."""
    rows = [
        {"prompt": f"say {WORDS[n % 10]}", "chosen": f"{WORDS[n % 7]} {n}", "rejected": "no " * (1 + n % 5)}
        for n in range(40)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny_task(
        tmp_path,
        data={"train": str(data), "eval": str(data)},
        train={"for": "2 epochs", "global_batch_size": 4, "precision": "bf16"},
        optim={"lr": 1e-12, "warmup": "0%", "min_lr_ratio": 1.0},
        objective="dpo",
    )


def _config(run_file: Path, name: str, *overrides: str) -> RunConfig:
    return read_config(run_file, [f"output_dir={run_file.parent}/{name}/run", "export.at_end=false", *overrides])


def _losses(config: RunConfig) -> list[float]:
    train(config)
    return [record["train/loss"] for record in metrics(Path(config.output_dir).parent)]


def test_unchanged_weights_have_the_loss_of_a_coin_toss_in_bf16(run_file: Path) -> None:
    """Packed rows in every epoch, padded rows in the first one, and held-out rows: not a digit of difference."""
    packed = _losses(_config(run_file, "packed", "data.packing=true"))
    assert packed == pytest.approx([LN_2] * len(packed), abs=1e-12)
    padded = _losses(_config(run_file, "padded", "data.packing=false"))
    assert padded[:10] == pytest.approx([LN_2] * 10, abs=1e-12)
    assert len(padded) == 20
    assert metrics(run_file.parent / "padded")[-1]["eval/loss"] == pytest.approx(LN_2, abs=1e-12)


def test_dropout_is_off_beside_a_reference_and_kept_in_config_json(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(run_file, "dropout", "train.for=1 steps", "train.precision=fp32", "export.at_end=true")
    file = Path(config.model.path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": 0.3}))
    assert _losses(config) == pytest.approx([LN_2], abs=1e-6)
    assert "off for dpo: attention_dropout 0.3" in capsys.readouterr().out
    exported = json.loads((run_file.parent / "dropout" / "run" / "export" / "config.json").read_text())
    assert exported["attention_dropout"] == 0.3


def _reference_files(run_file: Path) -> dict[str, int]:
    folder = run_file.parent / "cache" / "reference"
    return {str(path.parent.parent.name): path.stat().st_mtime_ns for path in folder.glob("*/logps/values.npy")}


def test_a_reference_is_found_again_by_all_that_decides_it(run_file: Path) -> None:
    shorter = "train.for=2 steps"
    first = _losses(_config(run_file, "first", shorter))
    written = _reference_files(run_file)
    assert len(written) == 1, "training and held-out rows are the same"
    assert _losses(_config(run_file, "again", shorter, "optim.lr=1e-3"))[0] == first[0]
    assert _reference_files(run_file) == written
    for change in ("train.precision=fp32", "train.micro_batch_size=4", "train.seed=1", "train.max_seq_len=48"):
        before = _reference_files(run_file)
        _losses(_config(run_file, change, shorter, change))
        found = _reference_files(run_file)
        assert len(found) == len(before) + 1, change
        assert found.items() >= before.items()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_resumed_run_compares_with_the_model_before_training(run_file: Path, stage: int) -> None:
    """Also where the cache is gone: the reference is computed from the model's folder, not from the checkpoint."""
    options = ["train.precision=fp32", "optim.lr=1e-3", f"deepspeed.zero_optimization.stage={stage}"]
    saved = ["train.for=6 steps", "checkpoint.every=3 steps"]
    whole = _losses(_config(run_file, "whole", *options, *saved))
    _losses(_config(run_file, "half", *options, *saved, "train.for=3 steps"))
    shutil.rmtree(run_file.parent / "cache" / "reference")
    resumed = _losses(_config(run_file, "half", *options, *saved))
    assert resumed == whole
    assert whole[-1] < LN_2 - 0.01


def test_ranks_share_one_reference(run_file: Path, tmp_path: Path) -> None:
    """Two ranks have the losses of one, at a stage that partitions the weights."""
    options = ["train.precision=fp32", "optim.lr=1e-3", "deepspeed.zero_optimization.stage=3", "train.for=3 steps"]
    alone = _losses(_config(run_file, "alone", *options))
    words = ["ds_finetune/train.py", str(run_file), *options, f"output_dir={tmp_path}/two/run", "export.at_end=false"]
    done = start(torchrun(*words))
    assert done.returncode == 0, done.stderr
    records: list[dict[str, Any]] = metrics(tmp_path / "two")
    assert [record["train/loss"] for record in records] == pytest.approx(alone, abs=1e-6)
