"""Processes of a run on a host: how they are known again, where they print, and how they end with what started them."""

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

TAG_VARIABLE = "DS_FINETUNE_PROCESS_TAG"
"""Environment variable that every process of a run on a host has: run id, attempt and host."""
SUPERVISOR_VARIABLE = "DS_FINETUNE_SUPERVISOR"
"""Environment variable with the name of the guard's socket, in the abstract namespace of unix(7)."""
RUN_ID = "DS_FINETUNE_RUN_ID"
"""Environment variable with the id of a run that mpirun or Slurm minds, and so the folder of its ranks' output."""
_ENDING_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def logs_folder(output_dir: str, run_id: str) -> Path:
    """Folder of the output of a run's ranks, on each host."""
    return Path(output_dir) / "logs" / run_id


def log_name(rank: int) -> str:
    """File name of a rank's output."""
    return f"rank-{rank:05d}.log"


def die_with_parent() -> None:
    """Let the kernel send SIGKILL to this process when its parent is gone, whatever that died of; nothing where there
    is no prctl.
    """
    try:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return


def tagged_processes(marks: Iterable[str]) -> list[int]:
    """Processes of this user that have one of `marks` in their environment, this one and those that have ended left
    out.
    """
    wanted = {f"{TAG_VARIABLE}={mark}".encode() for mark in marks}
    return [pid for pid in _pids() if pid != os.getpid() and not wanted.isdisjoint(_environment(pid))]


def kill_tagged(marks: Iterable[str]) -> int:
    """Send SIGKILL to every process with one of `marks` until none is there; returns how many still are after some
    seconds.

    A process ends when the kernel has taken its memory back, which takes a while for much of it, or for ever where it
    waits for a disk that hangs.
    """
    known, until = set(marks), time.monotonic() + _ENDING_SECONDS
    ending: set[int] = set()
    while found := [*tagged_processes(known), *filter(_is_there, ending)]:
        for pid in found:
            _kill(pid)
        ending.update(found)
        if time.monotonic() > until:
            return len(set(found))
        time.sleep(_LOOK_SECONDS)
    return 0


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    """Empty for a process of another user, and for one that has ended and is not yet taken note of."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _is_there(pid: int) -> bool:
    """Whether a process has not ended: its environment is gone before its memory is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
