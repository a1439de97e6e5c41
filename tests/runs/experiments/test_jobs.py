"""Signals that reach an experiment whose runs take a while to save."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

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


def test_a_run_diverged_only_where_it_failed_in_a_skipped_step(tmp_path: Path) -> None:
    run = ExperimentRun(tmp_path, {})
    run.metrics.path.parent.mkdir()
    run.metrics.path.write_text('{"step": 1, "train/skipped": 0.0}\n{"step": 2, "train/skipped": 1.0}\n')
    run.metrics.update()
    assert not run.has_diverged
    run.code = 1
    assert run.has_diverged
