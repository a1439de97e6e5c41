"""Sweeps: the sweep file, what is started, pruned, failed, resumed and refused."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial

from ds_finetune.cli.demo import write_demo
from ds_finetune.errors import INTERRUPTED_EXIT_CODE, ConfigError, DependencyError, LaunchError, OutputError, RunError
from ds_finetune.runs.experiments import jobs
from ds_finetune.runs.experiments.sweep import run_sweep
from ds_finetune.runs.experiments.sweep_file import SweepConfig, read_sweep
from tests.runs.report.test_page import PageParser

FAKE = (sys.executable, str(Path(__file__).with_name("fake_program.py")))
LR = {"low": 1e-5, "high": 0.1, "log": True}


def sweep_of(folder: Path, run: Mapping[str, Any] | None = None, **keys: object) -> SweepConfig:
    """A sweep over the learning rate, with `keys` set, and `run` added to its run file."""
    tree: dict[str, Any] = {
        "model": "m",
        "data": {"train": "t.jsonl", "eval": "e.jsonl"},
        "train": {"for": "4 steps"},
        "eval": {"every": "1 steps"},
        "output_dir": "unused",
    }
    for name, value in (run or {}).items():
        tree[name] = {**tree.get(name, {}), **value}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    sweep = {
        "run": str(folder / "run.yaml"),
        "output_dir": str(folder / "out"),
        "space": {"optim.lr": LR},
        "trials": 3,
        **keys,
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    return read_sweep(folder / "sweep.yaml")


def trials_of(folder: Path) -> list[FrozenTrial]:
    """The trials of a sweep, as optuna itself reads them from the journal."""
    storage = JournalStorage(JournalFileBackend(str(folder / "out" / "study.journal")))
    return optuna.load_study(study_name="sweep", storage=storage).trials


def states_of(folder: Path) -> list[str]:
    return [trial.state.name for trial in trials_of(folder)]


def run(sweep: SweepConfig) -> tuple[dict[str, str], list[str]]:
    """The results of a sweep and the lines that it printed."""
    lines: list[str] = []
    return dict(run_sweep(sweep, lines.append)), lines


def best_run_file(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((folder / "out" / "best.yaml").read_text())
    return tree


def test_the_best_run_file_a_table_and_a_plot_are_written(tmp_path: Path) -> None:
    results, _ = run(sweep_of(tmp_path, trials=5, parallel=2))
    trials = trials_of(tmp_path)
    assert states_of(tmp_path) == ["COMPLETE"] * 5
    best = min(trials, key=lambda trial: trial.value)
    assert results["best trial"] == f"{best.number}: {best.value:.6g}"
    # The stand-in's loss is least at 1e-3.
    assert best == min(trials, key=lambda trial: abs(np.log10(trial.params["optim.lr"]) + 3))
    written = best_run_file(tmp_path)
    assert written["optim"]["lr"] == best.params["optim.lr"]
    assert written["data"] == {"train": "t.jsonl", "eval": "e.jsonl"}
    trial = yaml.safe_load((tmp_path / "out" / "trials" / "0000" / "run.yaml").read_text())
    assert trial["export"] == {"at_end": False}
    assert "export" not in written
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count('class="plot"') == 1
    assert "start to end" in page
    ((line,),) = [chart["lines"] for chart in json.loads(PageParser(page).scripts[0])]
    assert line["x"] == pytest.approx([trial.params["optim.lr"] for trial in trials], rel=1e-5)
    assert line["y"] == pytest.approx([trial.value for trial in trials], rel=1e-5)
    assert all(f"{trial.value:.4f}" in page for trial in trials)


def test_the_median_pruner_ends_bad_trials_and_their_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECONDS_OF_A_STEP", "0.01")
    sweep = sweep_of(
        tmp_path,
        {"train": {"for": "80 steps"}},
        space={"optim.lr": {"low": 1e-3, "high": 0.1, "log": True}},
        sampler={"name": "TPESampler", "n_startup_trials": 5},
        pruner={"name": "MedianPruner", "n_startup_trials": 1},
        trials=5,
    )
    run(sweep)
    trials = trials_of(tmp_path)
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert max(trials[1:], key=lambda trial: trial.params["optim.lr"]) in pruned
    assert all(len(trial.intermediate_values) < 80 for trial in pruned)
    assert not list((tmp_path / "out").glob("trials/*/run/checkpoints"))


def test_a_grid_trains_each_combination_once_while_others_run(tmp_path: Path) -> None:
    choices = {"choices": [1e-3, 1e-2, 1e-4, 1e-3]}
    space = {"optim.lr": choices, "train.seed": {"choices": [1, 2]}}
    combinations = [{"optim.lr": str(lr), "train.seed": str(seed)} for lr in (1e-3, 1e-2, 1e-4) for seed in (1, 2)]
    _, lines = run(sweep_of(tmp_path, space=space, sampler="GridSampler", trials=4, parallel=2))
    assert lines[0].startswith("0 of 4 trials begun, 2 at once; ")
    assert [trial.params for trial in trials_of(tmp_path)] == combinations[:4]
    for _ in range(2):
        run(sweep_of(tmp_path, space=space, sampler="GridSampler", trials=9, parallel=2))
        assert [trial.params for trial in trials_of(tmp_path)] == combinations
    assert states_of(tmp_path) == ["COMPLETE"] * 6
    assert best_run_file(tmp_path)["optim"]["lr"] == 1e-3


_ENDS_WHEN_ASKED_TO_STOP = """
import signal, sys, yaml
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
folder = Path(yaml.safe_load(Path(sys.argv[2]).read_text())["output_dir"])
folder.mkdir()
(folder / "metrics.jsonl").write_text('{"step": 4, "eval/loss": 2.0}\\n')
signal.sigwait([signal.SIGTERM])
"""


def test_a_trial_that_has_trained_to_its_end_is_not_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pruner asks a run to stop which succeeds all the same."""
    monkeypatch.setattr(jobs, "_PROGRAM", (sys.executable, "-c", _ENDS_WHEN_ASKED_TO_STOP))
    results, _ = run(sweep_of(tmp_path, trials=1, pruner={"name": "ThresholdPruner", "upper": 1.0}))
    assert (states_of(tmp_path), results["best trial"]) == (["COMPLETE"], "0: 2")


def test_failed_trials_are_passed_over(tmp_path: Path) -> None:
    choices = {"optim.lr": {"choices": [5.0, 1e-3, 7.0]}}
    results, lines = run(sweep_of(tmp_path, space=choices, sampler="GridSampler"))
    assert results["optim.lr"] == "0.001"
    assert sum("fail: exit code 1: error: the learning rate is above 1" in line for line in lines) == 2


def test_a_signal_saves_and_the_same_sweep_goes_on(tmp_path: Path) -> None:
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    run(sweep_of(undisturbed))
    sweep = sweep_of(tmp_path)

    def interrupt(line: str) -> None:
        if line.startswith("trial 0"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as interrupted:
        run_sweep(sweep, interrupt)
    assert interrupted.value.code == INTERRUPTED_EXIT_CODE
    assert states_of(tmp_path)[0] == "COMPLETE"
    run(sweep)
    values = [[trial.value for trial in trials_of(folder)] for folder in (tmp_path, undisturbed)]
    assert values[0] == values[1]


_KILLED = """
import sys
from pathlib import Path
from ds_finetune.runs.experiments import jobs
from ds_finetune.runs.experiments.sweep import run_sweep
from ds_finetune.runs.experiments.sweep_file import read_sweep
jobs._PROGRAM = tuple(sys.argv[2:])
run_sweep(read_sweep(Path(sys.argv[1])), print)
"""


def test_a_killed_sweep_leaves_no_run_and_resumes_its_trial(tmp_path: Path) -> None:
    sweep_of(tmp_path, {"train": {"for": "150 steps"}}, trials=2)
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path / "sweep.yaml"), *FAKE],
        env={**os.environ, "SECONDS_OF_A_STEP": "0.01"},
    )
    metrics = tmp_path / "out" / "trials" / "0000" / "run" / "metrics.jsonl"
    until = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") > 5):
        assert time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    process.wait()
    run(read_sweep(tmp_path / "sweep.yaml"))
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 151))
    assert states_of(tmp_path) == ["COMPLETE"] * 2


def test_diverged_trials_do_not_end_a_sweep(tmp_path: Path) -> None:
    choices = {"optim.lr": {"choices": [0.6, 0.7, 0.8, 1e-3]}}
    results, lines = run(sweep_of(tmp_path, space=choices, sampler="GridSampler", trials=4))
    assert results["optim.lr"] == "0.001"
    assert states_of(tmp_path) == ["PRUNED"] * 3 + ["COMPLETE"]
    assert sum("pruned: diverged, eval/loss nan" in line for line in lines) == 3


def test_half_a_line_of_the_journal_is_removed(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    run(sweep)
    before = trials_of(tmp_path)
    with (tmp_path / "out" / "study.journal").open("a") as journal:
        journal.write('{"op_code": 4, "wor')
    _, said = run(sweep)
    assert any("the last line is incomplete; 19 bytes are removed" in line for line in said)
    assert trials_of(tmp_path) == before


def test_only_visible_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")

    def here(ranks: int, parallel: int) -> list[jobs.RunSlot]:
        return jobs.run_slots(ranks, parallel)

    assert [slot.gpus for slot in here(1, 2)] == [("2",), ("3",)]
    assert [slot.gpus for slot in here(2, 1)] == [("2", "3")]
    with pytest.raises(LaunchError, match="need 3 GPUs, but 2 are visible"):
        here(3, 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert here(1, 1)[0].gpus == ()


def test_files_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "best.yaml").write_text("mine")
    with pytest.raises(OutputError, match=r"out` is not empty, but holds no sweep: best.yaml"):
        run(sweep)
    assert (tmp_path / "out" / "best.yaml").read_text() == "mine"
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_a_sweep_starts_again_after_a_start_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk ends the first start after it has made its lock file, and before the journal exists."""
    sweep = sweep_of(tmp_path, trials=1)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(optuna.storages.journal, "JournalFileBackend", fail)
        with pytest.raises(OSError, match="No space left"):
            run(sweep)
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == [".lock"]
    run(sweep)
    assert states_of(tmp_path) == ["COMPLETE"]


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)

    def start_again(line: str) -> None:
        if line.startswith("trial 0"):
            with pytest.raises(OutputError, match=r"is in use by another run \(process"):
                run(sweep)
            raise RunError(line)

    with pytest.raises(RunError, match="trial 0"):
        run_sweep(sweep, start_again)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"space": {"optim.rate": LR}}, r"sweep.yaml line \d+: with `optim.rate: 1e-05`, .*unknown key `optim.rate`"),
        ({"space": {"optim.lr": {"low": 1, "high": 0.5}}}, r"`low <= high` must hold, but got \(low=1, high=0.5\)"),
        ({"space": {"optim.lr": {"low": 0, "high": 1, "log": True}}}, "`low >= 1` must hold"),
        ({"space": {"optim.lr": {"low": 1}}}, "either `choices`, or `low` and `high`"),
        ({"space": {"optim.lr": {"low": 0, "high": 1}}}, r"with `optim.lr: 0`, .*greater than 0"),
        ({"space": {"output_dir": {"choices": ["a"]}}}, "the sweep itself sets `output_dir`"),
        ({"space": {"eval.keep_best": {"choices": [True]}}}, "the sweep itself sets `eval.keep_best`"),
        (
            {"space": {"optim.lr": LR, "optim": {"choices": [{"lr": 1.0}]}}},
            "the space has `optim` and its key `optim.lr`",
        ),
        (
            {"space": {"optim.lr": {"low": "a", "high": 1}}},
            r"`space.optim.lr.low` is 'a': it should be a valid integer",
        ),
        ({"direction": "min"}, r"\n.*`direction` .by default \"minimize\".: see docs/how-to/sweeps.md"),
        ({"space": {"lora.rank": {"low": 8, "high": 12, "step": 4}}}, "unknown key `space.lora.rank.step`"),
        ({"sampler": "TPE"}, "`sampler.name` is 'TPE': it should be 'TPESampler', 'RandomSampler' or 'GridSampler'"),
        ({"sampler": "GridSampler"}, "`sampler: GridSampler` needs lists of values, .* a range for `optim.lr`"),
        ({"space": {}}, "space"),
        ({"metrics": "eval/loss"}, r"sweep.yaml line \d+: unknown key `metrics`"),
        ({"trials": 0}, "trials"),
    ],
)
def test_wrong_sweep_files_are_refused(tmp_path: Path, keys: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sweep_of(tmp_path, **keys)


@pytest.mark.parametrize(
    ("keys", "run_keys", "said"),
    [
        ({"pruner": {"name": "MedianPruner", "startup": 3}}, {}, "`pruner: MedianPruner` does not accept"),
        ({"sampler": {"name": "RandomSampler", "seed": 3}}, {}, "multiple values for keyword argument 'seed'"),
        ({"pruner": "MedianPruner"}, {"eval": {"every": None}}, "has no `eval.every`"),
        ({}, {"data": {"eval": ()}, "eval": {"every": None}}, "has no `data.eval`"),
    ],
)
def test_wrong_choices_are_refused_before_anything_is_written(
    tmp_path: Path, keys: dict[str, object], run_keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(sweep_of(tmp_path, run_keys, **keys))
    assert not (tmp_path / "out").exists()


def test_a_sweep_without_a_value_says_how_its_last_trial_ended(tmp_path: Path) -> None:
    message = r"none of 2 trials ended with a value of eval/loss; trial 1 has the state pruned: diverged"
    with pytest.raises(RunError, match=message):
        run(sweep_of(tmp_path, space={"optim.lr": {"choices": [0.6, 0.7]}}, sampler="GridSampler"))


def test_a_metric_that_no_record_has_ends_the_sweep_after_one_trial(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"`eval/los`, but trial 0 has not recorded it\n.*eval/loss"):
        run(sweep_of(tmp_path, metric="eval/los"))
    assert len(trials_of(tmp_path)) == 1


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        DependencyError, match=r"needs optuna: the extra `sweep` is not installed\n.*ds_finetune\[sweep\]"
    ):
        sweep_of(tmp_path)


def test_another_space_does_not_go_into_the_same_folder(tmp_path: Path) -> None:
    run(sweep_of(tmp_path))
    before = trials_of(tmp_path)
    with pytest.raises(ConfigError, match=r"holds a sweep with other settings: space; .*0.1.*0.2"):
        run(sweep_of(tmp_path, space={"optim.lr": {**LR, "high": 0.2}}))
    with pytest.raises(ConfigError, match=r"other settings: the run file; "):
        run(sweep_of(tmp_path, {"optim": {"weight_decay": 0.1}}))
    assert trials_of(tmp_path) == before


def test_a_sweep_of_another_version_is_not_resumed(tmp_path: Path) -> None:
    """Versions compare other settings, or give these other names."""
    sweep = sweep_of(tmp_path)
    run(sweep)
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "out" / "study.journal")))
    study = optuna.load_study(study_name="sweep", storage=storage)
    made_from = study.user_attrs["made_from"]
    study.set_user_attr("made_from", {f"`{name}`": text for name, text in made_from.items()})
    with pytest.raises(ConfigError, match=r"out` holds a sweep of another version of ds-finetune"):
        run(sweep)


@pytest.mark.slow
def test_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trials of the demo by the ordinary command."""
    monkeypatch.setattr(jobs, "_PROGRAM", (sys.executable, "-u", "-m", "ds_finetune"))
    monkeypatch.chdir(tmp_path)
    write_demo(Path("demo"), ranks=1)
    tree = {
        "model": {"path": "demo/model", "weights": "random"},
        "data": {"train": "demo/train.jsonl", "eval": "demo/eval.jsonl"},
        "train": {"for": "6 steps", "global_batch_size": 4, "max_seq_len": 256, "precision": "fp32"},
        "eval": {"every": "3 steps", "limit": 4},
        "log": {"trackers": [], "seconds": 0},
        "output_dir": "unused",
    }
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    sweep = SweepConfig.model_validate(
        {"run": "run.yaml", "output_dir": "out", "trials": 2, "sampler": "GridSampler"}
        | {"space": {"optim.lr": {"choices": [1e-6, 3e-3]}}}
    )
    results, _ = run(sweep)
    assert results["optim.lr"] == "0.003"
