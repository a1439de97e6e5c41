"""StackFile of this rank's threads in a file of its own, written by C code where Python cannot run."""

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

from ds_finetune.watchdog.process_death import FOLDER, began_at, mark_kill, stacks_path
from ds_finetune.watchdog.progress import RankStatus

_CALLS = 10
BACKSTOP_SECONDS = 20.0
"""How long after its limit a rank whose interpreter is held ends all the same."""


class StackFile:
    """`FOLDER/rank-00003.txt` of the run folder, taken away at the end where it stayed empty.

    SIGQUIT writes to it too, also where native code holds the interpreter; it ends nothing and so leaves no core of a
    rank's size.
    """

    def __init__(self, output_dir: Path, rank: int) -> None:
        self.path = stacks_path(output_dir / FOLDER, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        self._armed_until = math.inf
        self._lock = threading.Lock()
        self._is_closed = False
        faulthandler.register(signal.SIGQUIT, file=self._file, all_threads=True)

    def write(self, answer: RankStatus) -> None:
        """What the rank is doing, and where each thread stands."""
        with self._lock:
            if self._is_closed:
                return
            self._file.write(
                f"{datetime.now().astimezone().isoformat(timespec='seconds')} rank {answer.rank} {answer}\n"
            )
            self._file.writelines(f"  {call}\n" for call in answer.recent[-_CALLS:])
            self._file.flush()
            faulthandler.dump_traceback(file=self._file, all_threads=True)

    def arm(self, until: float) -> None:
        """End this process, with its stacks written, some seconds after `until` (monotonic) unless this is called
        again.

        A thread in C does it (Python 3.11, Modules/faulthandler.c), so that one that holds the interpreter is ended as
        well.
        """
        with self._lock:
            if until == self._armed_until or self._is_closed:
                return
            self._armed_until = until
            if math.isinf(until):
                faulthandler.cancel_dump_traceback_later()
                return
            seconds = max(until - time.monotonic(), 0) + BACKSTOP_SECONDS
            faulthandler.dump_traceback_later(seconds, file=self._file, exit=True)

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            self._is_closed = True
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGQUIT)
            self._file.close()
        with contextlib.suppress(OSError):
            if not self.path.stat().st_size:
                self.path.unlink()
            # Empty once no rank has written to it.
            self.path.parent.rmdir()


def process_id_space() -> str:
    """What two ranks have in common that see each other's process ids: this start of this machine, and its name space
    of processes.
    """
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {space.readlink()}" if boot.exists() and space.exists() else ""


def end_process(pid: int, began: str, *, folder: Path, why: str) -> None:
    """End a rank of this run on this machine that does not answer, with its stacks written where it still can.

    Other programs that see it go find `why` in `folder`.
    """
    if began and began_at(pid) == began:
        mark_kill(folder, pid, began, why)
    for number, seconds in ((signal.SIGCONT, 0.0), (signal.SIGQUIT, 1.0), (signal.SIGKILL, 0.0)):
        if not began or began_at(pid) != began:
            return
        with contextlib.suppress(OSError):
            os.kill(pid, number)
        time.sleep(seconds)
