"""The file with the Python stacks of a rank, written when the rank hangs, on SIGQUIT, and before it is killed."""

import faulthandler
import os
import signal
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from ds_finetune.cluster.watchdog.messages import RankProcess
from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.foreign.torch_distributed import flight_record
from ds_finetune.runs.status import try_to_finish
from ds_finetune.system.processes import began_at
from ds_finetune.system.rank_files import record_error


class StackFile:
    """The file `rank-00003.txt` with the stacks of a rank. It is removed at the end if it is empty.

    On SIGQUIT the process appends its stacks, even while native code holds the GIL. The signal does not end the
    process, so no core file is written.
    """

    def __init__(self, folder: Path, progress: RankProgress) -> None:
        self.path, self._progress = folder / f"rank-{progress.rank:05}.txt", progress
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        faulthandler.register(signal.SIGQUIT, file=self._file, all_threads=True)

    def write(self) -> None:
        """Append the rank's status and the stack of each thread; with NCCL, also write the file of its flight
        recorder.
        """
        now, rank = datetime.now().astimezone().isoformat(timespec="seconds"), self._progress.rank
        calls = "".join(f"  {call}\n" for call in tuple(self._progress.last_calls))
        with self._lock:
            if not self._file.closed:
                self._file.write(f"{now} rank {rank} {self._progress.status()}\n{calls}")
                self._file.flush()
                faulthandler.dump_traceback(file=self._file, all_threads=True)
        if record := flight_record():
            self.path.with_name(f"nccl_trace_rank_{rank}").write_bytes(record)

    def arm(self, seconds: float) -> None:
        """Set a timer that writes the stacks and ends this process after `seconds`; a new call replaces it.

        The timer is a C thread (Python 3.11, Modules/faulthandler.c). So it works even while native code holds the GIL
        and no other rank of the machine can kill this process.
        """
        # RuntimeError: there may be no memory for the timer's thread, e.g. with a limit of the address space.
        # OverflowError: `seconds` is infinite where the watchdog detects no hang.
        with self._lock, suppress(RuntimeError, OverflowError):
            if not self._file.closed:
                faulthandler.dump_traceback_later(seconds, file=self._file, exit=True)

    def close(self) -> None:
        """Stop writing stacks, and remove the file if it is empty."""
        with self._lock:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGQUIT)
            self._file.close()
        with suppress(OSError):
            if not self.path.stat().st_size:
                self.path.unlink()
            # `rmdir` raises OSError, which is ignored, while the folder has files of other ranks.
            self.path.parent.rmdir()


def kill_process(process: RankProcess, why: str) -> None:
    """Kill a hung rank of this machine, after a signal that makes the rank write its stacks. `why` is recorded as the
    error of the rank.

    Nothing is killed if the process id now belongs to a process with another start time.
    """
    if process.error_file and began_at(process.pid) == process.began:
        try_to_finish(lambda: record_error(f"killed by the watchdog: {why}", file=process.error_file))
    for number, seconds in ((signal.SIGCONT, 0.0), (signal.SIGQUIT, 1.0), (signal.SIGKILL, 0.0)):
        with suppress(OSError):
            if process.began and began_at(process.pid) == process.began:
                os.kill(process.pid, number)
                time.sleep(seconds)
