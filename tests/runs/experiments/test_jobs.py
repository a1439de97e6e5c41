"""Signals that reach an experiment whose runs take a while to save."""

import fcntl
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ds_finetune.runs.experiments import jobs
from ds_finetune.runs.experiments.jobs import RUN, ExperimentRun, JobsInterruptedError, RunSlot, run_jobs

_SAVES_SLOWLY = """
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[2]).parent
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
(folder / "began").touch()
while not asked:
    time.sleep(0.01)
time.sleep(1.5)
(folder / "saved").touch()
sys.exit(3)
"""
FAKE = (sys.executable, "-c", _SAVES_SLOWLY)


@pytest.mark.parametrize(("seconds", "is_saved"), [(0.3, True), (0.8, False)])
def test_only_a_second_request_kills_what_saves(tmp_path: Path, seconds: float, is_saved: bool) -> None:
    """A launcher forwards SIGINT, which the terminal has sent already: the copy is no second request."""

    def interrupt() -> None:
        while not (tmp_path / "began").exists():
            time.sleep(0.01)
        for pause in (seconds, 0):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(pause)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(JobsInterruptedError):
        run_jobs(iter([ExperimentRun(tmp_path, {"output_dir": str(tmp_path / RUN)}).train]), [RunSlot()])
    thread.join()
    assert (tmp_path / "saved").exists() is is_saved


def test_a_run_starts_once_that_of_an_earlier_process_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "_PROGRAM", (sys.executable, "-c", "pass"))
    held, ended = (tmp_path / jobs.LOG).open("ab"), threading.Event()
    fcntl.flock(held, fcntl.LOCK_EX)

    def end() -> None:
        ended.set()
        held.close()

    timer = threading.Timer(1.5, end)
    timer.start()
    run = ExperimentRun(tmp_path, {"output_dir": str(tmp_path / RUN)})
    run_jobs(iter([run.train]), [RunSlot()])
    assert ended.is_set()
    assert (run.code, run.reason) == (0, "")
    assert "waiting for the end of an earlier run" in capsys.readouterr().out.replace("\n", " ")


def test_a_run_diverged_only_where_it_failed_in_a_skipped_step(tmp_path: Path) -> None:
    run = ExperimentRun(tmp_path, {})
    run.metrics.path.parent.mkdir()
    run.metrics.path.write_text('{"step": 1, "train/skipped": 0.0}\n{"step": 2, "train/skipped": 1.0}\n')
    run.metrics.update()
    assert not run.has_diverged
    run.code = 1
    assert run.has_diverged
