"""The accelerator of this process: its selection and its memory."""

import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ds_finetune.errors import ConfigError, LaunchError
from ds_finetune.plan.precision import OLDEST_BF16, Bf16Support
from ds_finetune.system.free_memory import available_bytes, total_bytes
from ds_finetune.system.info import query_gpus
from ds_finetune.system.world import World

_HIDDEN = ("", "-1", "NoDevFiles")
"""Values of the variable CUDA_VISIBLE_DEVICES that hide all GPUs."""


def use_device(device: torch.device) -> None:
    """Select the GPU `device` for CUDA calls of this thread; no effect for a CPU.

    CUDA has a current device per thread, initially GPU 0, and its first call creates a context of about 0.5 GiB on that
    device. So a thread must call this before it uses CUDA.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def present_gpus(devices: Path = Path("/dev")) -> int:
    """Number of NVIDIA GPUs of this machine; 0 if CUDA_VISIBLE_DEVICES hides all of them. GPUs are counted by their
    device files or, if there are none (WSL 2), by nvidia-smi.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return 0
    return len(list(devices.glob("nvidia[0-9]*"))) or len(query_gpus())


def why_no_gpu() -> str:
    """The error message of CUDA if torch cannot use a GPU."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as why:
        return str(why).splitlines()[0]
    return "none is visible"


def visible_device(local_rank: int) -> int:
    """Index of a local rank's GPU among the GPUs that the process sees; 0 if each process sees only its own GPU.
    LaunchError if there are more local ranks than visible GPUs.
    """
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise LaunchError(
            f"local rank {local_rank} has no GPU: this host shows {count} GPUs to it",
            hint=f"start {count} ranks on this host, or set CUDA_VISIBLE_DEVICES to one GPU for each rank",
        )
    return local_rank if local_rank < count else 0


def device_of_rank(device: str, local_rank: int) -> str:
    """torch's name of a local rank's device, such as `cpu` or `cuda:1`."""
    return device if device == "cpu" else f"cuda:{visible_device(local_rank)}"


def bf16_support(device: str, world: World) -> Bf16Support | None:
    """Whether this rank's GPU supports bf16 matrix products; None on a CPU, for which DeepSpeed checks it."""
    if device == "cpu":
        return None
    index = visible_device(world.local_rank)
    capability = torch.cuda.get_device_capability(index)
    name = f"{torch.cuda.get_device_name(index)} (compute capability {'.'.join(map(str, capability))})"
    # All AMD GPUs (ROCm) that torch supports have bf16 matrix products, and they number capabilities differently.
    return Bf16Support(name, is_native=capability >= OLDEST_BF16 or torch.version.hip is not None)


def choose_device() -> str:
    """Choose the device type, and set the variable `DS_ACCELERATOR` to it for DeepSpeed. It is `cuda` if a GPU can be
    used and `DS_ACCELERATOR` is not `cpu`, else `cpu`. ConfigError if `DS_ACCELERATOR` names an accelerator that cannot
    be used, if it is not set and the machine's GPUs cannot be used, or if torch has no kernels for this process's GPU.
    """
    requested = os.environ.get("DS_ACCELERATOR") or None
    if requested not in (None, "cpu", "cuda"):
        raise ConfigError(
            f"DS_ACCELERATOR is `{requested}`, which is not supported", hint="set it to cuda or cpu, or unset it"
        )
    usable = torch.cuda.is_available()
    present = 0 if usable or requested else present_gpus()
    if not usable and (requested == "cuda" or present):
        host = socket.gethostname()
        wanted = f"{host} has {present} NVIDIA GPUs" if present else f"DS_ACCELERATOR is cuda on {host}"
        raise ConfigError(
            f"{wanted}, and torch {torch.__version__} can use no GPU: {why_no_gpu()}",
            hint="install a driver and a torch that fit each other (docs/how-to/install.md), or set DS_ACCELERATOR=cpu",
        )
    if requested is None and not usable and torch.xpu.is_available():
        raise ConfigError(
            f"{socket.gethostname()} has an Intel GPU, and ds-finetune supports only GPUs of NVIDIA and AMD",
            hint="set DS_ACCELERATOR=cpu to train on the CPU",
        )
    device = "cuda" if usable and requested != "cpu" else "cpu"
    if device == "cuda" and torch.version.cuda:
        # Expandable segments keep torch's allocator from wasting gigabytes by fragmentation. torch reads the variable
        # when CUDA is first used (2.13, c10/core/AllocatorConfig.h). It is not set here if the user has set it, if NCCL
        # registers torch's memory (this excludes expandable segments), or in WSL 2 (a first allocation may fail,
        # pytorch issue 192330).
        is_chosen = any(name in os.environ for name in (*_ALLOCATOR, "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"))
        if not is_chosen and not torch.cuda.is_initialized() and "microsoft" not in platform.release().lower():
            os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
        _check_kernels(visible_device(int(os.environ.get("LOCAL_RANK", "0"))))
    os.environ["DS_ACCELERATOR"] = device
    return device


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with settings of torch's GPU allocator, the newer name first."""


def allocator_settings() -> str:
    """Settings of torch's GPU allocator, made by the user or this program; empty if there are none."""
    return next((os.environ[name] for name in _ALLOCATOR if name in os.environ), "")


def _check_kernels(index: int) -> None:
    """Raise ConfigError if torch was built without kernels for the GPU, so that the first operation would fail. Kernels
    for `sm_XY` run on GPUs with the same major and an equal or higher minor capability. `compute_XY` is compiled at
    load time for any later capability. With a letter, as in `sm_90a`, kernels run only on exactly that capability.
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
        hint="install a torch with kernels for this GPU (docs/how-to/install.md), or set DS_ACCELERATOR=cpu",
    )


@contextmanager
def deepspeed_local_rank(index: int) -> Iterator[None]:
    """Context in which the environment variables for the local rank have the value `index`. DeepSpeed takes the
    GPU with this index (0.19.8, runtime/engine.py:1941-1966).
    """
    names = [name for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in os.environ]
    previous = {name: os.environ[name] for name in names}
    os.environ.update(dict.fromkeys(names, str(index)))
    try:
        yield
    finally:
        os.environ.update(previous)


_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)
"""Parts of RuntimeErrors that mean out of memory in torch 2.13: from its CPU allocator (c10/core/impl/alloc_cpu.cpp),
C++, CUDA driver calls, cuBLAS workspaces, and NCCL, whose older versions omit the number.
"""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the device that a rank uses, at one moment. On a CPU it is the rank's fraction of the host's memory."""

    name: str
    total_bytes: int
    free_bytes: int


def read_device_memory(world: World, device: str) -> DeviceMemory:
    """Memory that this rank may use: the free memory of its GPU according to the driver, or its fraction of the host's
    memory. Limits of control groups and of the address space (`ulimit -v`) are respected.
    """
    if device == "cuda":
        index = visible_device(world.local_rank)
        of_gpu, size = torch.cuda.mem_get_info(index)
        return DeviceMemory(torch.cuda.get_device_name(index), size, of_gpu)
    num_bytes = available_bytes() // world.local_world_size
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, max(0, limit - psutil.Process().memory_info().vms))
    return DeviceMemory("CPU", total_bytes() // world.local_world_size, num_bytes)


class PeakMemory:
    """Measures the peak memory of this process on its device since the object was created."""

    def __init__(self, device: str, world: World) -> None:
        self._index = visible_device(world.local_rank) if device == "cuda" else None
        if self._index is not None and torch.cuda.is_initialized():
            # torch's peak of reserved memory may be from an earlier run of the same process.
            torch.cuda.reset_peak_memory_stats(self._index)
        self._before = psutil.Process().memory_info().rss if self._index is None else _bytes_besides_torch(self._index)

    def num_bytes(self) -> int:
        """Peak memory in bytes. On a GPU it is the peak memory reserved by torch, plus memory that NCCL and other
        libraries have allocated since the start. On a CPU it is the growth of the process's resident memory.
        """
        if self._index is None:
            return max(0, peak_bytes("cpu") - self._before)
        other_bytes = max(0, _bytes_besides_torch(self._index) - self._before)
        return torch.cuda.max_memory_reserved(self._index) + other_bytes


def _bytes_besides_torch(index: int) -> int:
    free, total = torch.cuda.mem_get_info(index)
    return total - free - torch.cuda.memory_reserved(index)


def peak_bytes(device: str) -> int:
    """Peak memory of this process in bytes: of tensors on its GPU, or resident in host memory."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def restart_peak() -> None:
    """Reset the host's `peak_bytes` to the memory that is resident now. Works on Linux only."""
    with suppress(OSError), Path("/proc/self/clear_refs").open("w") as file:
        # Writing 5 to clear_refs resets the peak resident set size (proc(5)).
        file.write("5")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or an error that caused it, is a failed allocation of memory on a GPU or on the host."""
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
