"""The range test of learning rates: its run file, its result, and its errors."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ds_finetune.errors import ConfigError, OutputError, RunError
from ds_finetune.runs.experiments.jobs import ShortRuns
from ds_finetune.runs.experiments.lr_range import evaluate, run_range_test

FAKE = (sys.executable, str(Path(__file__).with_name("fake_range.py")))


def run_test(folder: Path, **keys: object) -> dict[str, str]:
    """A range test of a run file that evaluates and saves."""
    tree = {
        "model": "m",
        "data": {"train": "t.jsonl", "eval": "e.jsonl"},
        "optim": {"lr": 1e-5, "warmup": "3%", "weight_decay": 0.1},
        "eval": {"every": "1 steps"},
        "output_dir": "unused",
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    given: dict[str, Any] = {"low": 1e-5, "high": 10.0, "steps": 60, "overrides": (), **keys}
    runs = ShortRuns(folder / "run.yaml", given["overrides"], given["steps"], folder / "out")
    return dict(run_range_test(runs, given["low"], given["high"], ranks=1, say=lambda _: None))


def test_the_steepest_and_the_lowest_rate_are_found(tmp_path: Path) -> None:
    result = run_test(tmp_path)
    # The stand-in's loss is least at 1e-2, and grows beyond it without end. It is averaged over five steps to each side.
    factor = 1e6 ** (5 / 59)
    assert 1e-2 / factor <= float(result["lowest loss"]) <= 1e-2 * factor
    assert float(result["steepest fall"]) < float(result["lowest loss"])
    run = yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())
    assert run["optim"] == {
        "lr": 10.0,
        "weight_decay": 0.1,
        "lr_scheduler": "exponential_rise",
        "min_lr_ratio": pytest.approx(1e-6),
    }
    assert run["checkpoint"] == {"every": "never"}
    assert "eval" not in run
    assert "eval" not in run["data"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert result["report"] == str(tmp_path / "out" / "report.html")
    assert result["steepest fall"] in page
    assert page.count('class="plot"') == 1


def test_noise_of_the_first_steps_is_no_fall() -> None:
    rates = np.geomspace(1e-6, 1.0, 60)
    losses = np.full(60, 5.0)
    losses[0] = 6.0
    losses[30:40] = np.linspace(5.0, 3.0, 10)
    losses[40:] = 3.0
    steepest, _ = evaluate(rates, losses)
    assert rates[30] <= steepest <= rates[45]


def test_wrong_requests_are_refused_and_failed_runs_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"that rise from 1 to 0\.1"):
        run_test(tmp_path, low=1.0, high=0.1)
    with pytest.raises(ConfigError, match="--steps 3 is too few"):
        run_test(tmp_path, steps=3)
    with pytest.raises(ConfigError, match=r"unknown key `optim\.rate`"):
        run_test(tmp_path, overrides=("optim.rate=1",))
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match="exit code 1: no weight decay"):
        run_test(tmp_path, overrides=("optim.weight_decay=0",))
    with pytest.raises(OutputError, match="exists already"):
        run_test(tmp_path)


def test_a_refused_setting_stays_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exit code 2: no such model"):
        run_test(tmp_path, overrides=("optim.weight_decay=0.5",))
