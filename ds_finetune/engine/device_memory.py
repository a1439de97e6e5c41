"""Memory of this process's device: what it has, what is free, how much this process took at most, and errors that say
that it was not enough.
"""

import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_finetune.engine.devices import visible_device
from ds_finetune.system.free_memory import available_bytes, total_bytes
from ds_finetune.system.world import World

_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)
"""In RuntimeErrors of torch 2.13: of its CPU allocator (c10/core/impl/alloc_cpu.cpp), of calls of the driver, of
workspaces of cuBLAS, and of communicators of NCCL, whose older versions leave the number out.
"""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a rank's device, of a CPU rank its share of the host's, as seen at one moment."""

    name: str
    total_bytes: int
    free_bytes: int


def read_device_memory(world: World, device: str) -> DeviceMemory | None:
    """What this rank may use: free memory of its GPU by the driver, or a rank's share of what the host has left.

    Limits of control groups and of the address space (`ulimit -v`) count as the host's. None for a CPU except on Linux.
    """
    if device == "cuda":
        index = visible_device(world.local_rank)
        of_gpu, size = torch.cuda.mem_get_info(index)
        return DeviceMemory(torch.cuda.get_device_name(index), size, of_gpu)
    left, total = available_bytes(), total_bytes()
    if left is None or total is None:
        return None
    share = left // world.local_world_size
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        share = min(share, max(0, limit - _status_bytes("VmSize")))
    return DeviceMemory("CPU", total // world.local_world_size, share)


class PeakMemory:
    """The most that this process has taken of its device since the object was made."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cuda" and torch.cuda.is_initialized():
            # Of an earlier run of this process, whose device may be another.
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
        self._before = 0 if device == "cuda" else _status_bytes("VmRSS")

    def num_bytes(self) -> int:
        """`peak_bytes` on a GPU; on a CPU the growth of the process's resident memory up to its peak."""
        return max(0, peak_bytes(self._device) - self._before)


def peak_bytes(device: str) -> int:
    """Peak memory of this process: allocated by tensors on its GPU (`torch.cuda.max_memory_allocated`), or resident on
    the host.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def restart_peak() -> None:
    """Let the host's `peak_bytes` count from what is resident now; on Linux only."""
    with suppress(OSError), Path("/proc/self/clear_refs").open("w") as file:
        # proc(5): 5 resets the peak resident set size.
        file.write("5")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is that an allocation failed on a GPU or on the host."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        if isinstance(following, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(following, RuntimeError) and any(words in str(following) for words in _WORDS):
            return True
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    return False


def _status_bytes(name: str) -> int:
    """A number of /proc/self/status in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
