"""Observers of users: on every rank, with values of their own, and asking to stop."""

import os
from pathlib import Path

import pytest

from ds_finetune import train
from ds_finetune.errors import ConfigError, FinetuneError, RunError
from ds_finetune.observers.outside import ENTRY_POINTS, OutsideObservers
from ds_finetune.observers.record import StepRecord
from tests.observers.user_observer import StopsAt
from tests.running import metrics, start, tiny_task, torchrun

_FILES = {"export": {"at_end": False}}


def test_an_observer_adds_values_and_stops_the_run_which_is_saved(tmp_path: Path) -> None:
    run_file, observer = tiny_task(tmp_path, **_FILES), StopsAt(2)
    report = train(run_file, observers=[observer])
    assert report.last is not None
    assert (report.last.step, report.last.stop, observer.is_closed) == (2, "the user's reason", True)
    assert [record["user/twice"] for record in metrics(tmp_path)] == [2.0, 4.0]
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


def test_one_rank_of_an_installed_observer_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "packages" / "toy-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ntoy = tests.observers.user_observer:on_rank_one\n")
    run_file = tiny_task(tmp_path, log={"observers": "toy"}, train={"micro_batch_size": 1}, **_FILES)
    monkeypatch.syspath_prepend(str(info.parent))
    with pytest.raises(ConfigError, match=r"log\.observers names `tony`, which no installed package offers") as unknown:
        train(run_file, ["log.observers=[tony]"])
    assert "(installed: toy)" in unknown.value.message
    paths = os.pathsep.join([str(info.parent), os.environ.get("PYTHONPATH", "")])
    done = start(torchrun("ds_finetune/train.py", str(run_file)), {"PYTHONPATH": paths}, fork=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["step"] for record in metrics(tmp_path)] == [1, 2]


class _Returns:
    def __init__(self, returned: object) -> None:
        self.returned = returned

    def after_step(self, record: StepRecord) -> StepRecord:
        if isinstance(self.returned, Exception):
            raise self.returned
        return self.returned  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (KeyError("eval/los"), r"observer _Returns failed after step 1: KeyError: 'eval/los'"),
        ({"user/x": 1.0}, r"observer _Returns returned \{'user/x': 1.0\} after step 1"),
        (
            StepRecord(1, {"train/loss": 0.0}),
            r"observer _Returns returned StepRecord\(step=1, values=\{'train/loss': 0",
        ),
    ],
)
def test_what_an_observer_does_wrong_ends_the_run(returned: object, text: str) -> None:
    observers = OutsideObservers([_Returns(returned)], lambda stop: [stop])  # type: ignore[list-item]
    with pytest.raises(RunError, match=text):
        observers.after_step(StepRecord(1, {"train/loss": 2.0}))


def test_an_observer_may_return_nothing_or_raise_an_error_for_the_user() -> None:
    record, none = StepRecord(1, {"train/loss": 2.0}), _Returns(None)
    assert OutsideObservers([none], lambda stop: [stop]).after_step(record) == record  # type: ignore[list-item]
    own = _Returns(FinetuneError("too hot", hint="wait"))
    with pytest.raises(FinetuneError, match="too hot"):
        OutsideObservers([own], lambda stop: [stop]).after_step(record)  # type: ignore[list-item]
