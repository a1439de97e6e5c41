"""Which process an id belongs to: its start time, and the namespace in which the id is valid."""

import os
from pathlib import Path

_PROC = Path("/proc")


def began_at(pid: int) -> str:
    """Start time of a process in the kernel's ticks; empty where no process has that id, or there is no /proc."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def has_ended(pid: int, began: str) -> bool:
    """Whether the process that began then has ended, or is a zombie; the id must be of the own namespace."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return not _exists(pid)
    except OSError:
        return False
    return stat[19] != began or stat[0] in "ZX"


def _exists(pid: int) -> bool:
    """Whether a process has that id, also where /proc hides those of other users (mounted with hidepid=2)."""
    try:
        os.kill(max(pid, 1), 0)
    except PermissionError:
        return pid > 0
    except (OSError, OverflowError):
        return False
    return pid > 0


def own_pid_namespace() -> str:
    """Identifies the PID namespace in which this process's id is valid: the machine's boot id and the namespace.

    Two processes with the same text can signal each other. Empty where there is no /proc.
    """
    namespace = Path("/proc/self/ns/pid")
    return f"{boot_id()} {namespace.readlink()}" if boot_id() and namespace.exists() else ""


def boot_id() -> str:
    """The same text for all processes of one running kernel, also in different containers; empty without /proc."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""
