"""Processes of a run on a host: how they are known again, where they print, and how they end with what started them."""

import ctypes
import os
import signal
from pathlib import Path

MARK = "DS_FINETUNE_MARK"
"""Environment variable that every process of a run on a host has: run id, attempt and host."""
GUARD = "DS_FINETUNE_GUARD"
"""Environment variable with the name of the guard's socket, in the abstract namespace of unix(7)."""
RUN_ID = "DS_FINETUNE_RUN_ID"
"""Environment variable with the id of a run that mpirun or Slurm minds, and so the folder of its ranks' output."""
_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def logs_folder(output_dir: str, run_id: str) -> Path:
    """Folder of the output of a run's ranks, on each host."""
    return Path(output_dir) / "logs" / run_id


def log_name(rank: int) -> str:
    """File name of a rank's output."""
    return f"rank-{rank:05d}.log"


def die_with_parent() -> None:
    """Let the kernel send SIGKILL to this process when its parent is gone, whatever that died of; nothing where there is no prctl."""
    try:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return


def marked(mark: str) -> list[int]:
    """Processes of this user that have `mark` in their environment, this one left out."""
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid in _pids() if pid != os.getpid() and wanted in _environment(pid)]


def end_marked(mark: str) -> int:
    """Send SIGKILL to every process with `mark` until none is left that is not ending; returns how many there were."""
    ended: set[int] = set()
    # One that is forking may leave a child behind that was not there when the list was read.
    while found := [pid for pid in marked(mark) if pid not in ended]:
        for pid in found:
            _kill(pid)
        ended.update(found)
    return len(ended)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
