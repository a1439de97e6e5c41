"""What the numbers of a slice were measured on, and how long something takes there."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from ds_finetune.units import GIB

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
