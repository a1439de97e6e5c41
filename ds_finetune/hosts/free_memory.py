"""Memory that is still free for a process of this host."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def available_bytes() -> int | None:
    """Memory that is still free for this process: the host's, or its control group's where that is less; None except
    on Linux.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    host = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return min([host, *_left_in_cgroups()])


def _left_in_cgroups() -> Iterator[int]:
    """Free bytes of memory below the limits of control groups (cgroup versions 2 and 1): of this process's own group
    and of the container's root group.
    """
    own = [line.rpartition(":")[2].lstrip("/") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for root, limit_file, used_file in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for group in {Path(root), *(Path(root) / name for name in own)}:
            with suppress(OSError, ValueError):
                limit, used = (int((group / name).read_text()) for name in (limit_file, used_file))
                yield limit - used + _page_cache(group)


def _page_cache(group: Path) -> int:
    lines = (group / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
