"""What TensorBoard and MLflow received is what `metrics.jsonl` holds: in runs that end, resume, and lose a tracker."""

import importlib.util
import json
import math
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.errors import ConfigError
from ds_finetune.observers.record import StepRecord
from ds_finetune.observers.trackers import Trackers, flatten
from ds_finetune.observers.writers import MetricsFile

Points = dict[str, list[tuple[int, float]]]
HAS_MLFLOW = all(importlib.util.find_spec(name) for name in ("mlflow", "sqlalchemy", "alembic"))
needs_mlflow = pytest.mark.skipif(
    not HAS_MLFLOW,
    reason="mlflow, or what its SQLite store needs, is not installed",
)


@pytest.fixture(autouse=True)
def no_settings_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def recorded(run: Path) -> Points:
    """The finite values of `metrics.jsonl`."""
    points: Points = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                points.setdefault(name, []).append((line["step"], float(value)))
    return points


def in_tensorboard(run: Path) -> tuple[Points, Mapping[str, Any]]:
    """The scalars and parameters that readers of the event files see."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    given = HParamsPluginData.FromString(content).session_start_info.hparams
    return points, {name: getattr(value, value.WhichOneof("kind")) for name, value in given.items()}


def in_mlflow(run: Path) -> tuple[Points, dict[str, str]]:
    """The metrics and parameters of the only run in the store of a run folder, read with SQL."""
    with sqlite3.connect(run / "mlflow.db") as store:
        points: Points = {}
        for name, step, value in store.execute("select key, step, value from metrics order by step"):
            points.setdefault(name, []).append((step, value))
        assert store.execute("select count(*) from runs").fetchone() == (1,)
        return points, dict(store.execute("select key, value from params"))


def status_in_mlflow(run: Path) -> str:
    with sqlite3.connect(run / "mlflow.db") as store:
        return str(store.execute("select status from runs").fetchone()[0])


def assert_received(run: Path) -> None:
    """Both stores hold each value of `metrics.jsonl` once, at its step."""
    expected = recorded(run)
    assert in_mlflow(run)[0] == expected
    scalars = in_tensorboard(run)[0]
    assert scalars.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in scalars[name]] == [step for step, _ in points]
        assert [value for _, value in scalars[name]] == pytest.approx([value for _, value in points], rel=1e-6)


def record(step: int, **values: float) -> StepRecord:
    return StepRecord(step, {"train/loss": 1 / step, **values})


def take_steps(
    run: Path, records: list[StepRecord], *, said: list[str], is_resumed: bool = False, **config: Any
) -> None:
    trackers = Trackers(["tensorboard", "mlflow"], run, config, said.append, is_resumed=is_resumed)
    file = MetricsFile(run / "metrics.jsonl", said.append)
    for each in records:
        file.after_step(each)
        trackers.after_step(each)
    file.close()
    trackers.close()


@needs_mlflow
def test_stores_hold_each_step_after_a_kill_and_a_resume(tmp_path: Path) -> None:
    """Killed after step 7 with a checkpoint of step 6; MLflow has the same run afterwards."""
    said: list[str] = []
    run = tmp_path / "it's a run"
    run.mkdir()
    before = [record(step, **{"train/grad_norm": math.nan if step == 2 else 1.0}) for step in range(1, 8)]
    take_steps(run, before, said=said, optim={"lr": 1e-3}, data={"train": ["a", "b"]}, long="x" * 7000)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:6]))
    again = [record(step, **{"eval/a@b//c/loss": 2.0}) for step in (7, 8)]
    take_steps(run, again, said=said, is_resumed=True, optim={"lr": 2e-3})
    assert said == []
    expected = recorded(run)
    values, parameters = in_mlflow(run)
    assert values.pop("eval/a_b/c/loss") == expected["eval/a@b//c/loss"]
    assert values["train/loss"] == [*expected["train/loss"][:7], *expected["train/loss"][6:]], "step 7 twice"
    assert values["train/grad_norm"] == [(step, 1.0) for step in (1, 3, 4, 5, 6, 7)]
    assert parameters == {"optim.lr": "0.001", "data.train": '["a", "b"]', "long": "x" * 6000}
    with sqlite3.connect(run / "mlflow.db") as store:
        assert store.execute("select value from tags where key = 'resumed.optim.lr'").fetchone() == ("0.002",)
    scalars, hparams = in_tensorboard(run)
    assert {name: [step for step, _ in points] for name, points in scalars.items()} == {
        name: [step for step, _ in points] for name, points in expected.items()
    }
    assert hparams["optim.lr"] in (1e-3, 2e-3)
    assert status_in_mlflow(run) == "FINISHED"
    assert not list(Path.cwd().glob("mlruns"))


@needs_mlflow
def test_a_store_that_fails_in_mid_run_is_one_warning_and_gets_all_records(tmp_path: Path) -> None:
    said: list[str] = []
    trackers = Trackers(["tensorboard", "mlflow"], tmp_path, {"a": 1}, said.append)
    file = MetricsFile(tmp_path / "metrics.jsonl", said.append)
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        store.execute("alter table metrics rename to elsewhere")
        store.commit()
        for step in range(1, 4):
            trackers.after_step(file.after_step(record(step)))
        for _ in range(1000):
            if said:
                break
            time.sleep(0.01)
        store.execute("alter table elsewhere rename to metrics")
        store.commit()
    trackers.after_step(file.after_step(record(4)))
    for tracker, status in zip(trackers._trackers, [(), ("FAILED",)], strict=True):
        tracker.close(*status)
    file.close()
    assert status_in_mlflow(tmp_path) == "FAILED"
    assert said[0].startswith("mlflow CANNOT BE WRITTEN: ")
    assert all(line.startswith("mlflow is written again") for line in said[1:])
    assert_received(tmp_path)


_FAILS = """
import sys
from pathlib import Path
from ds_finetune.observers.record import StepRecord
from ds_finetune.observers.trackers import Trackers
trackers = Trackers(["mlflow"], Path(sys.argv[1]), {"a": 1}, print)
for step in (1, 2, 3):
    trackers.after_step(StepRecord(step, {"train/loss": 1.0, "eval/" + "long/" * 99: 2.0}))
raise RuntimeError("the run fails")
"""


@needs_mlflow
def test_a_run_that_fails_has_all_its_records_and_failed_in_mlflow(tmp_path: Path) -> None:
    """MLflow 3.17 refuses a batch with a name of more than 250 characters (utils/validation.py)."""
    failed = subprocess.run([sys.executable, "-c", _FAILS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "the run fails" in failed.stderr
    assert failed.stdout == ""
    assert status_in_mlflow(tmp_path) == "FAILED"
    values, _ = in_mlflow(tmp_path)
    assert values.pop("train/loss") == [(step, 1.0) for step in (1, 2, 3)]
    ((name, points),) = values.items()
    assert points == [(step, 2.0) for step in (1, 2, 3)]
    assert f"eval/{'long/' * 99}".startswith(name)
    assert len(name) > 200


@needs_mlflow
def test_a_run_after_a_failed_one_in_the_same_process_has_a_store_of_its_own(tmp_path: Path) -> None:
    failed, run = tmp_path / "failed", tmp_path / "run"
    failed.mkdir()
    run.mkdir()
    Trackers(["mlflow"], failed, {}, pytest.fail).after_step(record(1))
    take_steps(run, [record(2)], said=[])
    assert_received(run)
    assert (status_in_mlflow(failed), in_mlflow(failed)[0]) == ("FAILED", {"train/loss": [(1, 1.0)]})


class _Broken:
    """A tracker of accelerate whose server is gone."""

    def __init__(self, project: str) -> None:
        if project == "never":
            raise RuntimeError("no server\nand more")

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        assert values == {"a": 1}

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise ValueError(f"{len(values)} values of step {step}")

    def finish(self) -> None:
        raise ValueError("it is gone")


def test_another_tracker_that_fails_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = importlib.import_module("accelerate.tracking")
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "comet_ml", _Broken)
    said: list[str] = []
    trackers = Trackers(["comet_ml"], tmp_path, {"a": 1}, said.append)
    for step in range(1, 6):
        trackers.after_step(record(step))
    trackers.close()
    assert said == [
        "comet_ml CANNOT BE WRITTEN: 1 values of step 1; training continues, and its records wait",
        "comet_ml LACKS 5 RECORDS, which could not be written",
    ]
    with pytest.raises(ConfigError, match=r"`comet_ml`, which cannot be opened: no server\n"):
        Trackers(["comet_ml"], tmp_path / "never", {}, said.append)
    Trackers(["comet_ml"], tmp_path / "never", {}, said.append, is_resumed=True)
    assert said[2] == "comet_ml CANNOT BE OPENED: no server; training continues, and its records wait"


def test_parameters_are_the_keys_of_the_run_file() -> None:
    tree = {"a": {"b": 1, "c": {"d": "x", "e": {}}}, "f": None, "g": [1, 2], "h": True}
    assert flatten(tree) == {"a.b": 1, "a.c.d": "x", "a.c.e": "{}", "f": "null", "g": "[1, 2]", "h": True}


class _Wandb(_Broken):
    given: Mapping[str, str]

    def __init__(self, project: str, **names: str) -> None:
        _Wandb.given = {"project": project, **names}


def test_a_run_in_wandb_has_the_name_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.import_module("accelerate.tracking").LOGGER_TYPE_TO_CLASS, "wandb", _Wandb)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for name in ("WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    Trackers(["wandb"], tmp_path, {"a": 1}, pytest.fail)
    assert _Wandb.given == {"project": "mine", "name": tmp_path.name, "dir": str(tmp_path)}
