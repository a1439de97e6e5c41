"""What the numbers of a slice were measured on, and how long something takes there."""

import os
import platform
import shutil
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn import functional

from bench.gpu.results import Recorder, SkippedError
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


def machine(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """GPU, versions and compilers, and what the GPU reaches in a plain product, which no other number exceeds."""
    found = describe()
    with recorder.record("versions") as values:
        values |= {"python": found["python"], **found["versions"]}
    with recorder.record("device") as values:
        values |= {name: value for name, value in found.items() if name not in ("python", "versions")}
        if device().type == "cpu":
            raise SkippedError("no GPU")
        values["kernels of torch"] = torch.cuda.get_arch_list()
        values["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST", "not set")
        assert values["TORCH_CUDA_ARCH_LIST"] == found["capability"], "set it to the capability of this GPU"
    with recorder.record("compilers") as values:
        values |= {name: shutil.which(name) or "none" for name in ("nvcc", "g++", "ninja")}
    size = 64 if is_tiny else 8192
    with recorder.record(f"bf16 product of {size} x {size} x {size}") as values:
        one, other = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
        seconds = median_seconds(lambda: functional.linear(one, other), repeats=20)
        values["TFLOP/s"] = 2 * size**3 / seconds / 1e12


@contextmanager
def waits_for_gpu() -> Iterator[Counter[str]]:
    """While this is open, operations that wait for the GPU are counted by the place that asked; none on a CPU."""
    found = Counter[str]()
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
    found.update(
        f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}"
        for each in caught
        if "synchroniz" in str(each.message)
    )


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
