"""Total and free memory of this host for this process."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def available_bytes() -> int:
    """Free memory for this process in bytes: the host's, or its control group's if that is less."""
    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _cgroups())])


def total_bytes() -> int:
    """Maximum memory of this process in bytes: the host's, or its control group's if that is less."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _cgroups())])


def _cgroups() -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes of control groups with a memory limit (cgroup versions 2 and 1): this process's own
    group, and the container's root group. Page cache does not count as used.
    """
    own: list[str] = []
    with suppress(OSError):
        own = [line.rpartition(":")[2].lstrip("/") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for root, limit_file, used_file in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for group in {Path(root), *(Path(root) / name for name in own)}:
            with suppress(OSError, ValueError):
                limit, used = (int((group / name).read_text()) for name in (limit_file, used_file))
                lines = (group / "memory.stat").read_text().splitlines()
                cache = [int(each.split()[1]) for each in lines if each.startswith(("inactive_file ", "active_file "))]
                yield limit, used - sum(cache)
