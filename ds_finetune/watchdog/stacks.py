"""Writes the stacks of a rank's threads to a file, by C code where Python cannot run, and kills hung ranks."""

import contextlib
import faulthandler
import math
import os
import signal
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import TextIO

from ds_finetune.hosts.processes import began_at
from ds_finetune.runs.bounded import try_to_finish
from ds_finetune.watchdog.death_cause import FOLDER, record_kill, stacks_path
from ds_finetune.watchdog.progress import RankStatus

_CALLS = 10
BACKSTOP_SECONDS = 20.0
"""How long after its limit a rank's own timer ends it, where native code holds Python's lock."""


class StackFile:
    """The file `FOLDER/rank-00003.txt` in the run directory; it is removed at the end if it is empty.

    SIGQUIT makes the process append its stacks, even while native code holds Python's lock. The signal does not end
    the process, so no core file is written.
    """

    def __init__(self, output_dir: Path, rank: int) -> None:
        self.path = stacks_path(output_dir / FOLDER, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        self._armed_until = math.inf
        self._lock = threading.Lock()
        self._is_closed = False
        faulthandler.register(signal.SIGQUIT, file=self._file, all_threads=True)

    def write(self, status: RankStatus) -> None:
        """Append what the rank is doing, and the stack of each thread."""
        with self._lock:
            if self._is_closed:
                return
            self._file.write(
                f"{datetime.now().astimezone().isoformat(timespec='seconds')} rank {status.rank} {status}\n"
            )
            self._file.writelines(f"  {call}\n" for call in status.recent[-_CALLS:])
            self._file.flush()
            faulthandler.dump_traceback(file=self._file, all_threads=True)

    def arm(self, until: float) -> None:
        """Set a timer that writes the stacks and ends this process BACKSTOP_SECONDS after `until` (monotonic).

        A later call replaces the timer. It is a thread in C (Python 3.11, Modules/faulthandler.c), so it works even
        while native code holds Python's lock. While the stacks are being written, the timer stays as it is: the file
        system may not answer.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if until == self._armed_until or self._is_closed:
                return
            self._armed_until = until
            if math.isinf(until):
                faulthandler.cancel_dump_traceback_later()
                return
            seconds = max(until - time.monotonic(), 0) + BACKSTOP_SECONDS
            faulthandler.dump_traceback_later(seconds, file=self._file, exit=True)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Stop writing, and remove the file where it is empty."""
        with self._lock:
            self._is_closed = True
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGQUIT)
            self._file.close()
        with contextlib.suppress(OSError):
            if not self.path.stat().st_size:
                self.path.unlink()
            # This fails, and is ignored, while files of other ranks are in the folder.
            self.path.parent.rmdir()


def kill_process(pid: int, began: str, *, folder: Path, why: str) -> None:
    """Kill a hung rank on this machine, after a signal that makes it write its stacks.

    `why` is recorded in `folder` for programs that see the process die. Nothing is killed if the process id now belongs
    to a process with another start time than `began`.
    """
    if began and began_at(pid) == began:
        try_to_finish(lambda: record_kill(folder, pid, began, why))
    for number, seconds in ((signal.SIGCONT, 0.0), (signal.SIGQUIT, 1.0), (signal.SIGKILL, 0.0)):
        if not began or began_at(pid) != began:
            return
        with contextlib.suppress(OSError):
            os.kill(pid, number)
        time.sleep(seconds)
