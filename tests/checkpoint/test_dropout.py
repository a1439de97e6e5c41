"""Dropout: a resumed run draws what the uninterrupted one drew, evaluation draws nothing, and ranks draw apart."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.checkpoint.commit import step_name
from tests.encoder_task import encoder_task
from tests.running import start, torchrun

STEPS = 5
NUMBERS = ("train/loss", "train/grad_norm", "train/accuracy", "eval/loss")


def _run(run_file: Path, *overrides: str, ranks: int = 2) -> str:
    done = start(torchrun("ds_finetune/train.py", str(run_file), *overrides, ranks=ranks))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def _numbers(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{"step": record["step"]} | {name: record.get(name) for name in NUMBERS} for record in records]


def _without_last_steps(run: Path, *, after: int) -> None:
    for step in range(after + 1, STEPS + 1):
        shutil.rmtree(run / "checkpoints" / step_name(step))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a run with dropout and a checkpoint of each step, which has ended."""
    sections = {
        "train": {"for": f"{STEPS} steps", "activation_checkpointing": "full"},
        "checkpoint": {"every": "1 steps", "keep": STEPS},
        "eval": {"every": f"{STEPS} steps"},
        "export": {"at_end": False},
    }
    run_file = encoder_task(tmp_path_factory.mktemp("dropout"), dropout=0.2, **sections)
    _run(run_file)
    return run_file


def _copy(run_file: Path, folder: Path) -> Path:
    """The run with its folder, as it was."""
    shutil.copytree(run_file.parent / "run", folder)
    return folder


def test_a_resumed_run_draws_the_same_numbers_and_evaluation_none(whole: Path, tmp_path: Path) -> None:
    """The resumed run evaluates after each step, the whole one at its end."""
    wanted, run = _numbers(whole.parent / "run"), _copy(whole, tmp_path / "run")
    _without_last_steps(run, after=2)
    assert "resuming from" in _run(whole, f"output_dir={run}", "eval.every=1 steps")
    found = _numbers(run)
    assert [record["eval/loss"] is not None for record in found] == [False] * 2 + [True] * 3
    assert found[-1] == wanted[-1]
    assert [record["train/loss"] for record in found] == [record["train/loss"] for record in wanted]
    assert [record["train/grad_norm"] for record in found] == [record["train/grad_norm"] for record in wanted]


def test_other_ranks_draw_other_numbers_and_a_line_says_so(whole: Path, tmp_path: Path) -> None:
    run = _copy(whole, tmp_path / "run")
    _without_last_steps(run, after=2)
    shown = " ".join(_run(whole, f"output_dir={run}", ranks=1).split())
    assert "hidden_dropout_prob 0.2, attention_probs_dropout_prob 0.2 uses other random numbers" in shown
