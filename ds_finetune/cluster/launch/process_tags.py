"""Process tags: an environment variable marks the processes of a run, so that all on a host can be found and killed.

Also here are the names of the ranks' output files, and the other variables that launchers set for ranks.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

TAG_VARIABLE = "DS_FINETUNE_PROCESS_TAG"
"""Environment variable with the process tag: run id, attempt and index of the host."""
SUPERVISOR_VARIABLE = "DS_FINETUNE_SUPERVISOR"
"""Environment variable with the name of the supervisor's socket, in the abstract namespace of unix(7)."""
RUN_ID = "DS_FINETUNE_RUN_ID"
"""Environment variable with the id of a run that mpirun or Slurm supervises, and of its logs folder."""
_KILLING_SECONDS = 10.0
_POLL_SECONDS = 0.02
_EMPTY_SCANS = 2
_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def logs_folder(output_dir: str, run_id: str) -> Path:
    """Folder of the output of a run's ranks, on each host."""
    return Path(output_dir) / "logs" / run_id


def log_name(rank: int) -> str:
    """File name of a rank's output."""
    return f"rank-{rank:05d}.log"


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process when its parent ends for any reason; no effect without prctl(2)."""
    try:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number, 0, 0, 0)
    except (OSError, AttributeError):
        return


def tagged_processes(tags: Iterable[str]) -> list[int]:
    """Processes of this user with one of `tags` in their environment, except this one and those that have ended."""
    known, found = set(tags), []
    for process in psutil.process_iter():
        # Of another user, a zombie, or ended meanwhile.
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(TAG_VARIABLE) in known:
                found.append(process.pid)
    return found


def kill_tagged(tags: Iterable[str]) -> int:
    """Send SIGKILL to processes with one of `tags` until none is left; returns how many are left after some seconds.

    A killed process ends once the kernel has freed its memory. This takes a while for a large process, and does not
    happen while the process waits for a disk that hangs. None is left once two scans in a row have found none: while a
    process executes a new program, its environment reads as empty.
    """
    known, until = set(tags), time.monotonic() + _KILLING_SECONDS
    killed: set[int] = set()
    empty_scans = 0
    while empty_scans < _EMPTY_SCANS:
        remaining = {*tagged_processes(known), *filter(_has_not_ended, killed)}
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(remaining)
        if remaining and time.monotonic() > until:
            return len(remaining)
        empty_scans = 0 if remaining else empty_scans + 1
        time.sleep(_POLL_SECONDS)
    return 0


def _has_not_ended(pid: int) -> bool:
    """Whether a process has not ended: the kernel removes its environment before its memory."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False
