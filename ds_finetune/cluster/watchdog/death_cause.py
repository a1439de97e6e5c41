"""Finds out why a process died that reported no error: killed by this program, by its own timer, or for memory.

The module imports little, because the supervisor of `ds-finetune launch` imports it and must start quickly.
"""

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from ds_finetune.system.processes import began_at

FOLDER = "watchdog"
"""Folder in the run directory for the report, stacks and the records of kills."""
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def record_kill(folder: Path, pid: int, began: str, why: str) -> None:
    """Record that this program is about to kill a process; `folder` is FOLDER in the run directory."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        _kill_record(folder, pid).write_text(json.dumps({"began": began, "why": why}), encoding="utf-8")


def why_killed(folder: Path, pid: int, began: str) -> str:
    """The reason that `record_kill` recorded for a process; empty where there is no record that can be read."""
    return _why(_kill_record(folder, pid), began)


def _why(path: Path, began: str) -> str:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(record.get("why", "")) if isinstance(record, dict) and record.get("began") == began else ""


def record_cause(folder: Path, cause: str) -> None:
    """Record why the run ends, just before this process ends for it."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"cause-{os.getpid()}.json").write_text(json.dumps({"began": began_at(os.getpid()), "why": cause}))


def recorded_cause(folder: Path, pid: int, began: str) -> str:
    """What a process recorded by `record_cause`; empty where it has recorded nothing."""
    return _why(folder / f"cause-{pid}.json", began)


def stacks_path(folder: Path, rank: int) -> Path:
    """The file with the stacks of a rank."""
    return folder / f"rank-{rank:05}.txt"


def file_bytes(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def was_ended_by_timer(stacks: Path, after: int) -> bool:
    """Whether a rank was ended by its own timer (`StackFile.arm`), as happens when native code holds Python's lock.

    The timer writes `Timeout (` before the stacks (Python 3.11, Modules/faulthandler.c). This run's stacks begin at
    byte `after` of the file.
    """
    try:
        return b"Timeout (" in stacks.read_bytes()[after:]
    except OSError:
        return False


def oom_kills(path: Path = Path("/proc/vmstat")) -> int:
    """Number of processes that this machine's kernel has killed for lack of memory (Linux 4.13 and later; else 0)."""
    try:
        match = _OOM_KILLS.search(path.read_text())
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _kill_record(folder: Path, pid: int) -> Path:
    return folder / f"killed-{pid}.json"
