"""Keeps `status.json` and `log.txt` of a run on rank zero: what it is doing, how it ended, and the lines it printed."""

import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path

from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.console.phase_line import Say
from ds_finetune.export.verify.verify import VerificationResult
from ds_finetune.observers.line_file import append_whole
from ds_finetune.observers.outage import Outage
from ds_finetune.runs.folder import LOG
from ds_finetune.runs.status import ALIVE_SECONDS, RunStatus, State, mark_ended, write_running
from ds_finetune.system.processes import began_at, own_pid_namespace

_MOST_WAITING = 1_000


class RunLog:
    """`log.txt`: the lines that rank zero prints about a run, each with its time. Lines wait until `open` is called."""

    def __init__(self, say: Say) -> None:
        self._print = say
        self._file: FileIO | None = None
        self._waiting: list[str] = []
        self._lines: Outage[bytes] | None = None
        self._lock = threading.RLock()
        """The watchdog adds lines from another thread."""

    def say(self, line: str) -> None:
        """Print a line, and add it."""
        self._print(line)
        self.add(line)

    def add(self, text: str) -> None:
        """Add a text of one or more lines without printing it."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        for line in text.splitlines():
            self._put(f"{now}  {line}")

    def open(self, path: Path) -> None:
        """Append to the file from now on, beginning with the lines that have waited; OSError where that fails."""
        self._file = FileIO(path, "a")
        self._lines = Outage(str(path), self._write, self._print, most=_MOST_WAITING)
        waiting, self._waiting = self._waiting, []
        for line in waiting:
            self._put(line)

    def close(self) -> None:
        """Write queued lines and close the file."""
        if self._lines is not None and self._file is not None:
            self._lines.close()
            self._file.close()
            self._lines = self._file = None

    def _put(self, line: str) -> None:
        with self._lock:
            if self._lines is None:
                self._waiting = [*self._waiting[-_MOST_WAITING:], line]
            else:
                self._lines.put(f"{line}\n".encode(errors="replace"))

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        append_whole(self._file, line)


class StatusKeeper:
    """Writes the status of a run every few seconds from a thread of its own, from `begin` to `end`.

    A file system that does not answer then holds up neither the training nor the watchdog.
    """

    def __init__(self, folder: Path, log: RunLog) -> None:
        self._folder, self._log = folder, log
        self._started_at = time.time()
        self._closed = threading.Event()
        self._progress: RankProgress | None = None
        self._thread: threading.Thread | None = None

    def begin(self, progress: RankProgress, *, steps: int, ranks: int) -> None:
        """Write the status of a run that has its folder, now and from now on; `steps` are those of the whole run."""
        self._log.open(self._folder / LOG)
        first = RunStatus(
            "running",
            steps=steps,
            ranks=ranks,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_namespace=own_pid_namespace(),
            began=began_at(os.getpid()),
            started_at=self._started_at,
        )
        write_running(self._folder, _now(first, progress))
        self._progress = progress
        self._thread = threading.Thread(target=self._keep, args=(first, progress), name="run-status", daemon=True)
        self._thread.start()

    def end(self, state: State, reason: str = "") -> None:
        """Write how the run ended, unless the watchdog has, and end the thread, if the file system lets it; nothing
        where the run has not begun or has ended.
        """
        if self._progress is None or self._thread is None or self._closed.is_set():
            return
        self._closed.set()
        mark_ended(self._folder, state, reason, step=self._progress.step)
        self._log.add(f"{state}: {reason}" if reason else state)
        self._log.close()
        self._thread.join(ALIVE_SECONDS)

    def end_without_error(self, interrupted: str, stop: str, verdicts: Iterable[VerificationResult]) -> None:
        """Write the end of a run that has met no error: the signal that ended it, why it ended early, and the results
        of verifying its exports; each may be empty.
        """
        wrong = [str(verdict.folder) for verdict in verdicts if verdict.problems]
        if interrupted:
            self.end("stopped", interrupted)
        elif wrong:
            self.end("failed", f"not what was exported when loaded again: {', '.join(wrong)}")
        else:
            self.end("finished", stop)

    def _keep(self, first: RunStatus, progress: RankProgress) -> None:
        while not self._closed.wait(ALIVE_SECONDS) and write_running(self._folder, _now(first, progress)):
            pass


def _now(first: RunStatus, progress: RankProgress) -> RunStatus:
    """The status with the progress that the run has made."""
    try:
        limit = progress.limit_seconds()
    except RuntimeError:
        # The training thread has added a step's time while the median was taken.
        limit = math.inf
    return replace(
        first,
        phase=progress.phase,
        step=progress.step,
        updated_at=time.time(),
        idle_seconds=time.monotonic() - progress.last_progress_at(),
        limit_seconds=None if math.isinf(limit) else limit,
    )


@contextmanager
def keep_status(folder: Path, log: RunLog) -> Iterator[StatusKeeper]:
    """While open, keep the status of a run in `folder` once it has begun; an error ends it as failed."""
    keeper = StatusKeeper(folder, log)
    try:
        yield keeper
    except BaseException as error:
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        keeper.end("failed", f"{type(error).__name__}: {text}" if text else type(error).__name__)
        raise
