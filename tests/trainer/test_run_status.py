"""The status and the log that rank zero keeps of a run: how it ended, at which step, and what it printed."""

import contextlib
from pathlib import Path

import pytest

from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.runs.status import mark_ended, seen_status
from ds_finetune.trainer.run_records import RunLog, keep_status


def _progress(step: int) -> RankProgress:
    progress = RankProgress(0, WatchdogConfig())
    progress.step = step
    return progress


def _fail(error: Exception) -> None:
    raise error


def test_an_error_ends_a_run_as_failed_with_its_last_step(tmp_path: Path) -> None:
    printed: list[str] = []
    log, progress = RunLog(printed.append), _progress(0)
    log.say("before the folder\nexists")
    with contextlib.suppress(OSError), keep_status(tmp_path, log) as status:
        status.begin(progress, steps=9, ranks=2)
        assert (seen_status(tmp_path).state, seen_status(tmp_path).steps) == ("running", 9)
        progress.step = 7
        _fail(OSError("full\nmore"))
    seen = seen_status(tmp_path)
    assert (seen.state, seen.reason, seen.step, seen.ranks) == ("failed", "OSError: full", 7, 2)
    lines = [line[21:] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert lines == ["before the folder", "exists", "failed: OSError: full"]
    assert printed == ["before the folder\nexists"]


@pytest.mark.parametrize(
    ("interrupted", "stop", "state", "reason"),
    [
        ("", "", "finished", ""),
        ("", "no better", "finished", "no better"),
        ("SIGTERM", "SIGTERM", "stopped", "SIGTERM"),
    ],
)
def test_ends_without_an_error(tmp_path: Path, interrupted: str, stop: str, state: str, reason: str) -> None:
    with keep_status(tmp_path, RunLog(pytest.fail)) as status:
        status.begin(_progress(3), steps=3, ranks=1)
        status.end_without_error(interrupted, stop, ())
    assert (seen_status(tmp_path).state, seen_status(tmp_path).reason) == (state, reason)


def test_the_watchdogs_reason_remains(tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError), keep_status(tmp_path, RunLog(pytest.fail)) as status:
        status.begin(_progress(3), steps=9, ranks=2)
        mark_ended(tmp_path, "hung", "rank 1 does not answer")
        _fail(RuntimeError("a consequence"))
    assert (seen_status(tmp_path).state, seen_status(tmp_path).reason) == ("hung", "rank 1 does not answer")


def test_a_run_that_has_not_begun_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), keep_status(tmp_path, RunLog(pytest.fail)):
        raise ValueError("x")
    assert list(tmp_path.iterdir()) == []
