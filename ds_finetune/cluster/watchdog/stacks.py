"""Stacks of a rank, written when it hangs, on a signal, or when another rank kills it."""

import faulthandler
import math
import os
import signal
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from ds_finetune.cluster.watchdog.heartbeats import RankProcess
from ds_finetune.cluster.watchdog.progress import RankStatus
from ds_finetune.foreign.torch_distributed import flight_record
from ds_finetune.runs.status import try_to_finish
from ds_finetune.system.error_file import record_error
from ds_finetune.system.processes import began_at

_CALLS = 10
_ARM_SECONDS = 30.0


class StackFile:
    """The file `rank-00003.txt` in a folder; it is removed at the end if it is empty.

    On SIGQUIT the process appends its stacks, even while native code holds the GIL. The signal does not end the
    process, so no core file is written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank:05}.txt"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        self._rank, self._armed_at = rank, -math.inf
        self._lock = threading.Lock()
        faulthandler.register(signal.SIGQUIT, file=self._file, all_threads=True)

    def write(self, status: RankStatus) -> None:
        """Append the status and the stack of each thread; with NCCL also write a file for `torchfrtrace`."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        # Another thread may have closed the file.
        with suppress(ValueError):
            self._file.write(f"{now} rank {self._rank} {status}\n")
            self._file.writelines(f"  {call}\n" for call in status.recent[-_CALLS:])
            self._file.flush()
            faulthandler.dump_traceback(file=self._file, all_threads=True)
        if record := flight_record():
            self.path.with_name(f"nccl_trace_rank_{self._rank}").write_bytes(record)

    def arm(self, seconds: float) -> None:
        """Set a timer that writes the stacks and ends this process after `seconds`; a new call replaces it.

        The timer is a C thread (Python 3.11, Modules/faulthandler.c). So it works while native code holds the GIL and
        no other rank of the machine can kill this one. Calls within `_ARM_SECONDS` of the last one do nothing.
        """
        now = time.monotonic()
        # There may be no memory for the timer's thread, e.g. with a limit of the address space.
        with self._lock, suppress(RuntimeError):
            if not self._file.closed and math.isfinite(seconds) and now > self._armed_at + _ARM_SECONDS:
                faulthandler.dump_traceback_later(seconds, file=self._file, exit=True)
                self._armed_at = now

    def close(self) -> None:
        """Stop writing, and remove the file where it is empty."""
        with self._lock:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGQUIT)
            self._file.close()
        with suppress(OSError):
            if not self.path.stat().st_size:
                self.path.unlink()
            # Fails, and is ignored, while files of other ranks are in the folder.
            self.path.parent.rmdir()


def kill_process(process: RankProcess, why: str) -> None:
    """Kill a hung rank of this machine, after a signal that makes it write its stacks; `why` becomes its error.

    Nothing is killed if the process id now belongs to a process with another start time.
    """
    if process.error_file and began_at(process.pid) == process.began:
        try_to_finish(lambda: record_error(f"killed by the watchdog: {why}", file=process.error_file))
    for number, seconds in ((signal.SIGCONT, 0.0), (signal.SIGQUIT, 1.0), (signal.SIGKILL, 0.0)):
        if not process.began or began_at(process.pid) != process.began:
            return
        with suppress(OSError):
            os.kill(process.pid, number)
        time.sleep(seconds)
