"""This process's accelerator: its choice, its memory, and a check that no two ranks use the same GPU."""

import json
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ds_finetune.errors import ConfigError, LaunchError, RunError
from ds_finetune.plan.precision import OLDEST_BF16, Bf16Support
from ds_finetune.system.free_memory import available_bytes, total_bytes
from ds_finetune.system.info import query_gpus
from ds_finetune.system.world import World

_HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU."""


def present_gpus(devices: Path = Path("/dev")) -> int:
    """Number of GPUs in `devices`, or that nvidia-smi lists where there are none, as in WSL 2; 0 where
    CUDA_VISIBLE_DEVICES hides all of them on purpose.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return 0
    return len(list(devices.glob("nvidia[0-9]*"))) or len(query_gpus())


def why_no_gpu() -> str:
    """CUDA's own reason why torch can use no GPU."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as why:
        return str(why).splitlines()[0]
    return "none is visible"


def visible_device(local_rank: int) -> int:
    """Number of a local rank's GPU among those visible to this process; 0 where a scheduler shows each process only its
    own GPU.
    """
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise LaunchError(
            f"local rank {local_rank} sees {count} GPUs",
            hint=f"start {count} ranks on this host, or show each rank only its own GPU",
        )
    return local_rank if local_rank < count else 0


def device_of_rank(device: str, local_rank: int) -> str:
    """The device `cpu` or `cuda` of a local rank, with the number of its GPU, as torch names it."""
    return device if device == "cpu" else f"cuda:{visible_device(local_rank)}"


def bf16_support(device: str, world: World) -> Bf16Support | None:
    """Whether this rank's GPU has products in bf16; None for a CPU, which answers itself."""
    if device == "cpu":
        return None
    index = visible_device(world.local_rank)
    capability = torch.cuda.get_device_capability(index)
    name = f"{torch.cuda.get_device_name(index)} (compute capability {'.'.join(map(str, capability))})"
    # ROCm's numbers are of another count; all GPUs that its torch runs on have products in bf16.
    return Bf16Support(name, is_native=capability >= OLDEST_BF16 or torch.version.hip is not None)


def choose_device() -> str:
    """`cuda` where a GPU can be used and `DS_ACCELERATOR` is not `cpu`, else `cpu`; the variable is set to the
    choice for DeepSpeed.

    ConfigError where `DS_ACCELERATOR` names an accelerator that cannot be used, where it is not set and this machine
    has GPUs that torch or this program cannot use, and where the installed torch has no kernels for this process's GPU.
    """
    wanted = os.environ.get("DS_ACCELERATOR") or None
    if wanted not in (None, "cpu", "cuda"):
        raise ConfigError(f"DS_ACCELERATOR is `{wanted}`", hint="set it to cuda or cpu, or unset it")
    usable = torch.cuda.is_available()
    if wanted == "cuda" and not usable:
        raise ConfigError(
            f"DS_ACCELERATOR is cuda, and torch {torch.__version__} can use no GPU on {socket.gethostname()}: "
            f"{why_no_gpu()}",
            hint="install a driver and a torch that fit each other (docs/how-to/install.md), or set DS_ACCELERATOR=cpu",
        )
    if wanted is None and not usable and (present := present_gpus()):
        raise ConfigError(
            f"{socket.gethostname()} has {present} NVIDIA GPUs, and torch {torch.__version__} can use none: "
            f"{why_no_gpu()}",
            hint="install a driver and a torch that fit each other (docs/how-to/install.md), or set DS_ACCELERATOR=cpu",
        )
    if wanted is None and not usable and torch.xpu.is_available():
        raise ConfigError(
            f"{socket.gethostname()} has an Intel GPU, and ds-finetune runs on those of NVIDIA and AMD",
            hint="set DS_ACCELERATOR=cpu to train on the CPU",
        )
    device = "cuda" if usable and wanted != "cpu" else "cpu"
    if device == "cuda" and torch.version.cuda:
        # torch's allocator grows its segments, so that free blocks of other sizes do not add up to gigabytes. It reads
        # the variable when CUDA is first used (2.13, c10/core/AllocatorConfig.h). Nothing is chosen where the user has,
        # where NCCL is to register torch's memory, which excludes it, and in WSL 2, where a first allocation may fail
        # (pytorch issue 192330).
        is_chosen = any(name in os.environ for name in (*_ALLOCATOR, "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"))
        if not is_chosen and not torch.cuda.is_initialized() and "microsoft" not in platform.release().lower():
            os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
        _check_kernels(visible_device(int(os.environ.get("LOCAL_RANK", "0"))))
    os.environ["DS_ACCELERATOR"] = device
    return device


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with settings of torch's allocator, by age of their names, the newer first."""


def allocator_settings() -> str:
    """The settings of torch's allocator for GPUs; empty where none are chosen."""
    return next((os.environ[name] for name in _ALLOCATOR if name in os.environ), "")


def _check_kernels(index: int) -> None:
    """ConfigError where torch was built without kernels for a GPU: its first operation would fail.

    Those of `sm_XY` run on the same major and an equal or later minor capability; `compute_XY` is compiled for any
    later one when it is loaded. A letter, as in `sm_90a`, restricts kernels to that capability.
    """
    major, minor = torch.cuda.get_device_capability(index)
    built = torch.cuda.get_arch_list()
    for kind, first, second, letter in re.findall(r"(sm|compute)_(\d+)(\d)([a-z]?)", " ".join(built)):
        x, y = int(first), int(second)
        is_near = (x, y) == (major, minor) if letter else x == major and y <= minor
        if is_near or (kind == "compute" and (x, y) <= (major, minor)):
            return
    raise ConfigError(
        f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}, and torch {torch.__version__} "
        f"has kernels for {', '.join(built) or 'no GPU'}",
        hint="install a torch with kernels for it (docs/how-to/install.md), or set DS_ACCELERATOR=cpu",
    )


@contextmanager
def deepspeed_local_rank(index: int) -> Iterator[None]:
    """While this is open, the variables that DeepSpeed reads as its local rank are `index`.

    DeepSpeed takes the local rank for the number of its GPU (0.19.8, runtime/engine.py:1941-1966).
    """
    names = [name for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in os.environ]
    kept = {name: os.environ[name] for name in names}
    os.environ.update(dict.fromkeys(names, str(index)))
    try:
        yield
    finally:
        os.environ.update(kept)


def exchange(store: dist.Store, world: World, topic: str, mine: str, *, timeout: timedelta) -> list[str]:
    """The text of every rank about `topic`, by rank, before there is a process group; RunError after `timeout`."""
    keys = [f"{topic}/{rank}" for rank in range(world.world_size)]
    store.set(keys[world.rank], mine)
    try:
        store.wait(keys, timeout)
    except (dist.DistError, RuntimeError):
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise RunError(
            f"rank {world.rank} has waited {timeout} for the {topic} of ranks {', '.join(missing)}",
            hint="another rank failed before, or is slower than watchdog.collective",
        ) from None
    return [store.get(key).decode() for key in keys]


def own_device(world: World, device: str) -> str:
    """Kind, GPU and host of this process as JSON, for `check_same_devices`."""
    gpu = str(torch.cuda.get_device_properties(visible_device(world.local_rank)).uuid) if device == "cuda" else ""
    return json.dumps({"device": device, "gpu": gpu, "host": socket.gethostname()})


def check_same_devices(found: list[str]) -> None:
    """LaunchError where ranks use different accelerators or two of them one GPU; `found` has their `own_device` by
    rank.
    """
    ranks = [json.loads(text) for text in found]
    first = ranks[0]
    for rank, one in enumerate(ranks):
        if one["device"] != first["device"]:
            raise LaunchError(
                f"rank 0 on {first['host']} uses {first['device']} and rank {rank} on {one['host']} uses "
                f"{one['device']}",
                hint="see nvidia-smi on the host without a GPU, leave that host out, or set DS_ACCELERATOR=cpu on all",
            )
        same = next((other for other in range(rank) if one["gpu"] and ranks[other]["gpu"] == one["gpu"]), None)
        if same is not None:
            raise LaunchError(
                f"ranks {same} and {rank} on {one['host']} use the same GPU {one['gpu']}",
                hint="start as many ranks on a host as it has GPUs, or show each rank a GPU of its own",
            )


_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)
"""In RuntimeErrors of torch 2.13: of its CPU allocator (c10/core/impl/alloc_cpu.cpp), of C++, of calls of the driver,
of workspaces of cuBLAS, and of communicators of NCCL, whose older versions leave the number out.
"""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a rank's device, of a CPU rank its share of the host's, as seen at one moment."""

    name: str
    total_bytes: int
    free_bytes: int


def read_device_memory(world: World, device: str) -> DeviceMemory:
    """What this rank may use: free memory of its GPU by the driver, or a rank's share of what the host has left.

    Limits of control groups and of the address space (`ulimit -v`) count as the host's.
    """
    if device == "cuda":
        index = visible_device(world.local_rank)
        of_gpu, size = torch.cuda.mem_get_info(index)
        return DeviceMemory(torch.cuda.get_device_name(index), size, of_gpu)
    share = available_bytes() // world.local_world_size
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        share = min(share, max(0, limit - _status_bytes("VmSize")))
    return DeviceMemory("CPU", total_bytes() // world.local_world_size, share)


class PeakMemory:
    """The most that this process has taken of its device since the object was made."""

    def __init__(self, device: str, world: World) -> None:
        self._index = visible_device(world.local_rank) if device == "cuda" else None
        if self._index is not None and torch.cuda.is_initialized():
            # Of an earlier run of this process, whose device may be another.
            torch.cuda.reset_peak_memory_stats(self._index)
        self._before = _status_bytes("VmRSS") if self._index is None else _bytes_besides_torch(self._index)

    def num_bytes(self) -> int:
        """On a GPU what torch has reserved for tensors, and what NCCL and other libraries have taken since; on a CPU
        the growth of the process's resident memory up to its peak.
        """
        if self._index is None:
            return max(0, peak_bytes("cpu") - self._before)
        others = max(0, _bytes_besides_torch(self._index) - self._before)
        return torch.cuda.max_memory_reserved(self._index) + others


def _bytes_besides_torch(index: int) -> int:
    """Bytes of a GPU that are taken, but not by the allocator of this process."""
    free, total = torch.cuda.mem_get_info(index)
    return total - free - torch.cuda.memory_reserved(index)


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
