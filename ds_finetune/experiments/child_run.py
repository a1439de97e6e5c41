"""A run of the ordinary command in a process of its own, whose metrics are read while it is running."""

import ctypes
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from ds_finetune.errors import INTERRUPTED_EXIT_CODE
from ds_finetune.experiments.places import Place
from ds_finetune.runs.metrics import MetricsReader

LOG = "output.log"
RUN_FILE = "run.yaml"
RUN = "run"
_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_LAST_LINES = 3


class ChildRun:
    """A run that was started in `folder`, which gets `run.yaml`, `output.log` and the run folder `run`.

    Where this process ends for any reason, also by kill -9, the kernel sends the run SIGTERM, so that it saves and
    ends. A run in the same folder is resumed where it has checkpoints, and starts anew where it has none.
    """

    def __init__(self, folder: Path, run_file: str, place: Place) -> None:
        self.folder, self.place = folder, place
        self.metrics = MetricsReader(folder / RUN / "metrics.jsonl")
        self.is_stopped = False
        folder.mkdir(parents=True, exist_ok=True)
        _write_run_file(folder / RUN_FILE, run_file)
        self._began = time.monotonic()
        with (folder / LOG).open("ab") as log:
            self.process = subprocess.Popen(
                place.command(folder / RUN_FILE),
                env=place.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def identity(self) -> list[float]:
        """Process id and start time, by which `wait_for` finds the process again."""
        return [self.process.pid, psutil.Process(self.process.pid).create_time()]

    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it is running. Reads what was added to the metrics."""
        code = self.process.poll()
        self.metrics.update_all()
        return code

    def stop(self) -> None:
        """Let the run save and end; a second call has no effect."""
        if not self.is_stopped and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.is_stopped = True

    def why_failed(self, code: int) -> str:
        """The exit code in words, with the last lines of the output."""
        if code == INTERRUPTED_EXIT_CODE:
            return "it was ended by a signal"
        lines = (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        text = " / ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}: {text}"


def wait_for(identity: list[float]) -> None:
    """Wait until the process of an earlier `identity` has ended, for a run that still saves."""
    pid, created = identity
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(pid))
        if process.create_time() == created:
            process.wait()


def _write_run_file(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _end_with_parent() -> None:
    """Let the kernel send SIGTERM to the new process when this one ends; no effect where prctl(2) is missing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
