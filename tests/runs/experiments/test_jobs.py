"""Signals that reach an experiment whose runs take a while to save."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ds_finetune.runs.experiments import jobs
from ds_finetune.runs.experiments.jobs import RUN, ExperimentRun, RunSlot, run_all

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
def test_only_a_second_request_does_not_wait_until_runs_have_saved(
    tmp_path: Path, seconds: float, is_saved: bool
) -> None:
    """A launcher forwards SIGINT, which the terminal has sent already: the copy is no second request."""

    def interrupt() -> None:
        while not (tmp_path / "began").exists():
            time.sleep(0.01)
        for pause in (seconds, 0):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(pause)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SystemExit):
        run_all(iter([ExperimentRun(tmp_path, {"output_dir": str(tmp_path / RUN)})]), [RunSlot()])
    thread.join()
    assert (tmp_path / "saved").exists() is is_saved


def test_a_run_starts_once_that_of_an_earlier_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier run, which has no checkpoints yet, keeps its files. Another run uses the slot that is free."""
    folder, file = tmp_path / "first", tmp_path / "first" / RUN / "file"
    monkeypatch.setattr(jobs, "_PROGRAM", (sys.executable, "-c", f"import os; print(os.path.exists({str(file)!r}))"))
    file.parent.mkdir(parents=True)
    file.touch()
    with (folder / jobs.LOG).open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        earlier = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log)
    try:
        first, second = (ExperimentRun(each, {"output_dir": str(each / RUN)}) for each in (folder, tmp_path / "second"))
        assert not first.start(RunSlot())
        assert file.exists()
        assert second.start(RunSlot())
        assert second.process.wait() == 0
        threading.Timer(1.5, earlier.kill).start()
        run_all(iter([first]), [RunSlot()])
        assert earlier.poll() is not None
    finally:
        earlier.kill()
        earlier.communicate()
    assert (first.code, first.reason) == (0, "")
    assert (folder / jobs.LOG).read_text() == "False\n"
    assert capsys.readouterr().out.count("waiting for an earlier process") == 1


def test_a_signal_ends_the_wait_for_an_earlier_process(tmp_path: Path) -> None:
    with (tmp_path / jobs.LOG).open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(SystemExit):
            run_all(iter([ExperimentRun(tmp_path, {"output_dir": str(tmp_path / RUN)})]), [RunSlot()])
    assert not (tmp_path / jobs.RUN_FILE).exists()


def test_a_run_diverged_only_where_it_failed_in_a_skipped_step(tmp_path: Path) -> None:
    run = ExperimentRun(tmp_path, {})
    run.metrics.path.parent.mkdir()
    run.metrics.path.write_text('{"step": 1, "train/skipped": 0.0}\n{"step": 2, "train/skipped": 1.0}\n')
    run.metrics.update()
    assert not run.has_diverged
    run.code = 1
    assert run.has_diverged
