"""Whole runs whose rewards are at fault: the error names reward, row and answer, and nothing is written before a start."""

import json
from pathlib import Path

import pytest

from ds_finetune.config.schema import read_config
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.system.world import World
from ds_finetune.trainer.prepare import prepare_run
from ds_finetune.trainer.resolve import resolve_here
from tests.objectives.rewards.scoring import FILE
from tests.running import start
from tests.sums_task import sums_task


def test_a_reward_that_fails_ends_the_run_and_says_on_what(tmp_path: Path) -> None:
    """The steps before it are saved. It gets the row 0+5 for the second one, which is sampled ahead of the first."""
    (tmp_path / "mine.py").write_text(
        f"from runpy import run_path\nscore = run_path({str(FILE)!r})['prints_and_raises']\n"
        "def prints_and_raises(record, text):\n    return score(record) if record['answer'] == '05' else 1.0\n"
    )
    rewards = ["exact_match", f"{tmp_path}/mine.py:prints_and_raises"]
    ahead = {"rollout": {"ahead": 1}, "objective": {"mismatch": "token"}, "data": {"shuffle": False}}
    done = start(["ds-finetune", "train", str(sums_task(tmp_path, rewards=rewards, **ahead))])
    error = " ".join(done.stderr.split())
    assert done.returncode == 1, error
    assert f"reward `prints_and_raises` failed on {tmp_path}/train.jsonl line " in error
    assert "it raised KeyError: 'no such column' at" in error
    assert 'record: {"prompt": ' in error
    assert "step 1 is saved, and the same command resumes from there" in error
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()
    log = tmp_path / "run" / "rewards" / "rank-0.txt"
    assert f"what it printed is in {log}" in error
    assert "from the reward" in log.read_text()
    assert "from the reward" not in done.stdout + done.stderr


def test_a_reward_that_never_applies_is_an_error(tmp_path: Path) -> None:
    done = start(["ds-finetune", "train", str(sums_task(tmp_path, rewards=[f"{FILE}:not_applicable"]))])
    assert done.returncode == 1
    error = " ".join(done.stderr.split())
    assert "no reward applies to any of the 16 answers of the first rollout: not_applicable returned None" in error


def test_a_function_that_a_file_does_not_have_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    done = start(["ds-finetune", "train", str(sums_task(tmp_path, rewards=[f"{FILE}:absent"]))])
    assert done.returncode == 2, done.stderr
    assert "cases.py:absent`: the file has no `absent`" in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("reward", "source", "message"),
    [
        ("none.py:reward", "", r"none.py:reward` cannot be read: .Errno 2. No such file"),
        ("mine.py:reward", "def reward(:", r"mine.py:reward` cannot be read: invalid syntax"),
        ("mine.py:reward", "\0", r"mine.py:reward` cannot be read: source code string cannot contain null bytes"),
        ("number", "", r"line 1: reward `number` cannot use column `answer`: it is 'x', which has no number"),
        ("code", "", r"line 1: reward `code` needs column `tests`, and the record has answer, prompt"),
    ],
)
def test_what_is_known_before_the_start_is_an_error_then(
    reward: str, source: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(source)
    run_file = sums_task(tmp_path, rewards=[f"{tmp_path}/{reward}" if ":" in reward else reward])
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "x"}) + "\n")
    with pytest.raises((ConfigError, DataError), match=message) as wrong:
        prepare_run(resolve_here(read_config(run_file), World.from_environment({})))
    assert wrong.value.exit_code == 2
    assert wrong.value.hint
