"""What the numbers of a slice were measured on, and how long something takes there."""

import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from ds_finetune.config.units import GIB

_PACKAGES = ("torch", "transformers", "deepspeed", "liger-kernel", "bitsandbytes", "triton", "peft")


def device() -> torch.device:
    """The GPU where there is one and DS_ACCELERATOR does not say otherwise, else the CPU."""
    is_gpu = os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if is_gpu else "cpu")


def describe() -> dict[str, Any]:
    """GPU, processor, memory and versions."""
    found: dict[str, Any] = {
        "cores": os.cpu_count(),
        "host_gib": round(psutil.virtual_memory().total / GIB, 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }
    if device().type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpu_gib": round(properties.total_memory / GIB, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def count_kernels(work: Callable[[], object]) -> int | None:
    """Kernels that `work` starts on the GPU; None on a CPU."""
    if device().type == "cpu":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


@contextmanager
def count_waits() -> Iterator[list[int]]:
    """While this is open, operations that wait for the GPU are counted; the number is appended at the end, but on a
    CPU.
    """
    found: list[int] = []
    if device().type == "cpu":
        yield found
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found.append(sum("synchroniz" in str(warning.message) for warning in caught))


def median_seconds(work: Callable[[], object], *, repeats: int) -> float:
    """Median time of `work` in seconds, after one call that warms up."""
    is_gpu = device().type == "cuda"
    seconds = []
    for number in range(repeats + 1):
        if is_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if is_gpu:
            torch.cuda.synchronize()
        if number:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
