"""A file system that does not answer holds up neither the end of a run nor the watchdog.

A pipe without a reader stands for the file system: to open it for writing blocks.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ds_finetune.cluster.watchdog.endings import RunEnding
from ds_finetune.runs import status
from ds_finetune.runs.folder import REPORT
from ds_finetune.runs.status import STATUS, RunStatus, mark_ended
from tests.cluster.watchdog.ranks import Ranks
from tests.runs.test_folder import own_status


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Callbacks that free the hung writers after the test, which is given one tenth of a second for each file."""
    monkeypatch.setattr(status, "WRITE_SECONDS", 0.1)
    with ExitStack() as frees:
        yield frees
    for thread in threading.enumerate():
        if thread.name == "bounded-work":
            thread.join(60)
            assert not thread.is_alive()


def _hang(path: Path, frees: ExitStack) -> None:
    os.mkfifo(path)
    frees.callback(lambda: os.close(_opened(path)))


def _opened(path: Path) -> int:
    """The pipe, opened for reading until the writer has taken it away."""
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    limit = time.monotonic() + 60
    while path.exists() and time.monotonic() < limit:
        time.sleep(0.01)
    return reader


def test_the_end_of_a_run_does_not_wait_for_its_file(tmp_path: Path, hung: ExitStack) -> None:
    own_status().write(tmp_path)
    _hang(tmp_path / f".{STATUS}.{os.getpid()}", hung)
    caller = threading.Thread(target=mark_ended, args=(tmp_path, "hung", "rank 1 does not answer"), daemon=True)
    caller.start()
    caller.join(60)
    assert not caller.is_alive()
    status = RunStatus.read(tmp_path)
    assert (status.state if status else "") == "running"


def test_a_rank_takes_note_of_the_end_although_the_report_cannot_be_written(tmp_path: Path, hung: ExitStack) -> None:
    ranks = Ranks(tmp_path)
    report = ranks.folder / REPORT
    report.parent.mkdir()
    _hang(report.with_name(f".{report.name}.{os.getpid()}"), hung)
    monitor = ranks.monitors[0]
    told = threading.Thread(target=monitor._accept, args=(RunEnding((1,), "rank 1 is dead"),), daemon=True)
    told.start()
    told.join(60)
    assert monitor._ending_known.is_set()
