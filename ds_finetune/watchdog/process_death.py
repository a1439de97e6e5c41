"""What is known of the end of a process that could not state a reason itself. Imports little: the guard starts
quickly.
"""

import json
import re
from contextlib import suppress
from pathlib import Path

FOLDER = "watchdog"
"""Folder of the run folder for reports, stacks and marks."""
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def began_at(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty where there is none of that id (or no /proc)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def mark_kill(folder: Path, pid: int, began: str, why: str) -> None:
    """Write down that this program ends a process, before it does; `folder` is FOLDER of the run folder."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _mark(folder, pid).write_text(json.dumps({"began": began, "why": why}), encoding="utf-8")


def why_killed(folder: Path, pid: int, began: str) -> str:
    """Why this program ended a process; empty where it did not, or where the mark is not seen here."""
    try:
        mark = json.loads(_mark(folder, pid).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(mark.get("why", "")) if isinstance(mark, dict) and mark.get("began") == began else ""


def stacks_path(folder: Path, rank: int) -> Path:
    """File with the stacks of a rank."""
    return folder / f"rank-{rank:05}.txt"


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def was_held(stacks: Path, after: int) -> bool:
    """Whether a rank was ended by its own timer, which runs out where native code holds Python's lock.

    The timer writes `Timeout (` before the stacks (Python 3.11, Modules/faulthandler.c); `after` is where this run's
    stacks begin.
    """
    try:
        return b"Timeout (" in stacks.read_bytes()[after:]
    except OSError:
        return False


def oom_kills(path: Path = Path("/proc/vmstat")) -> int:
    """Processes of this machine that the kernel has ended for want of memory (Linux 4.13 and later; 0 elsewhere)."""
    try:
        found = _OOM_KILLS.search(path.read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _mark(folder: Path, pid: int) -> Path:
    return folder / f"killed-{pid}.json"
