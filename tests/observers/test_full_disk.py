"""Logs on a disk without room: the run goes on, no line is torn, and what was lost is counted."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from ds_finetune.config.sections import LogConfig
from ds_finetune.console import tables
from ds_finetune.console.tables import show_line
from ds_finetune.observers import trackers, writers
from ds_finetune.observers.progress import ProgressLine
from ds_finetune.observers.record import StepRecord
from ds_finetune.observers.trackers import Trackers
from ds_finetune.observers.writers import MetricsFile, Outage
from tests.running import files_of_at_most

VALUES = dict.fromkeys(
    (
        "train/loss",
        "train/grad_norm",
        "optim/lr",
        "perf/tokens_per_second",
        "perf/step_seconds",
        "perf/data_wait_seconds",
        "perf/eta_seconds",
        "memory/peak_gib",
        "train/skipped_steps",
    ),
    1.0,
)


def record(step: int) -> StepRecord:
    return StepRecord(step, VALUES | {"train/loss": float(step)})


def test_metrics_wait_for_room_and_lines_stay_whole(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, said.append)
    file.after_step(record(1))
    full = path.stat().st_size
    with files_of_at_most(full + 20):
        for step in range(2, 30):
            assert file.after_step(record(step)).step == step
            assert path.stat().st_size == full
    assert said == [f"{path} CANNOT BE WRITTEN: File too large; training continues, and its records wait"]
    for step in range(30, 60):
        file.after_step(record(step))
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 60))
    assert len(said) == 2
    assert said[1].startswith(f"{path} is written again, with ")


def test_records_that_are_lost_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "MAX_WAITING", 5)
    said: list[str] = []
    written: list[int] = []

    def write(number: int) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        written.append(number)

    is_full = True
    log = Outage("log", write, said.append)
    for number in range(8):
        log.put(number)
    log.close()
    assert said[1:] == ["log LACKS 8 RECORDS, which could not be written"]
    log = Outage("log", write, said.append)
    for number in range(8):
        log.put(number)
    is_full = False
    for number in range(8, 24):
        log.put(number)
    assert (
        said[-1]
        == f"log is written again, with 4 records that had waited; {written[0]} were lost before, because at most 5 wait"
    )
    assert written == list(range(written[0], written[-1] + 1))
    assert written[0] > 0


def test_metrics_that_never_find_room_are_counted_at_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, said.append)
    with files_of_at_most(0):
        for step in range(1, 4):
            file.after_step(record(step))
        file.close()
    assert said[1:] == [f"{path} LACKS 3 RECORDS, which could not be written"]
    assert path.read_bytes() == b""


@pytest.mark.parametrize("how", ["limit", "nearly full"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_has_every_step_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said: list[str] = []
    opened = Trackers(["tensorboard"], tmp_path, {"lr": 1e-3}, said.append)
    opened.after_step(record(1))
    # A new file's first bytes fit, and no record does.
    with files_of_at_most(100) if how == "limit" else monkeypatch.context() as patch:
        if patch is not None:
            patch.setattr(trackers, "_ROOM_BYTES", 2**80)
        for step in range(2, 6):
            opened.after_step(record(step))
    for step in range(6, 12):
        opened.after_step(record(step))
    opened.close()
    assert ["CANNOT BE WRITTEN" in line for line in said] == [True, False]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars("train/loss")} == {
        step: float(step) for step in range(1, 12)
    }


def test_lines_on_a_full_standard_output_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it writes what is left, and fails
    line = ProgressLine(steps=2, section=LogConfig(seconds=0), out=full)
    assert line.after_step(record(1)).step == 1
    # A console of its own: rich prints what could not be written once more with the next line.
    monkeypatch.setattr(tables, "OUT", Console(file=full))
    show_line("still here")
    for end in (full.flush, full.close):
        with pytest.raises(OSError, match="No space"):
            end()
