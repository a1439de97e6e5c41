"""Records why a process ends, and finds out whether the kernel's OOM killer ended it, for programs that see it die.

`ds-finetune launch` imports this module and must start quickly, so the module imports no torch.
"""

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from ds_finetune.system.processes import began_at

FOLDER = "watchdog"
"""Folder in the run directory for the report, stacks and records of kills."""
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def record_kill(folder: Path, pid: int, began: str, why: str) -> None:
    """Record that this program is about to kill process `pid`; `folder` is FOLDER in the run directory."""
    _write_reason(folder / f"killed-{pid}.json", began, why)


def why_killed(folder: Path, pid: int, began: str) -> str:
    """The reason that `record_kill` recorded for a process; empty without a readable record."""
    return _read_reason(folder / f"killed-{pid}.json", began)


def record_cause(folder: Path, cause: str) -> None:
    """Record why the run ends, just before this process ends because of it."""
    _write_reason(folder / f"cause-{os.getpid()}.json", began_at(os.getpid()), cause)


def recorded_cause(folder: Path, pid: int, began: str) -> str:
    """The cause that a process recorded by `record_cause`; empty where it recorded none."""
    return _read_reason(folder / f"cause-{pid}.json", began)


def _write_reason(path: Path, began: str, why: str) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"began": began, "why": why}), encoding="utf-8")


def _read_reason(path: Path, began: str) -> str:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(record.get("why", "")) if isinstance(record, dict) and record.get("began") == began else ""


def oom_kills(path: Path = Path("/proc/vmstat")) -> int:
    """Number of processes that this machine's kernel has killed for lack of memory (Linux 4.13 and later; else 0)."""
    try:
        match = _OOM_KILLS.search(path.read_text())
    except OSError:
        return 0
    return int(match[1]) if match else 0
