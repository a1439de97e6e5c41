"""What a device has and a process takes, and which errors say that memory ran out."""

import numpy as np
import pytest
import torch

from ds_finetune.config.units import GIB, MIB
from ds_finetune.engine.devices import PeakMemory, is_out_of_memory, read_device_memory
from ds_finetune.system.world import World


def _error_of(num_bytes: int) -> RuntimeError:
    with pytest.raises(RuntimeError) as found:
        torch.empty(num_bytes, dtype=torch.uint8)
    return found.value


def test_an_allocation_that_fails_is_out_of_memory_whatever_is_raised_from_it() -> None:
    failed = _error_of(2**50)
    assert is_out_of_memory(failed)
    with pytest.raises(ValueError, match="of a library") as wrapped:
        raise ValueError("of a library") from failed
    assert is_out_of_memory(wrapped.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**50, dtype=np.uint8)
    assert is_out_of_memory(of_numpy.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.distributed.DistBackendError("ncclUnhandledCudaError\nLast error:\nCuda failure 2 'out of memory'"),
    ],
    ids=("driver", "C++", "cuBLAS", "NCCL"),
)
def test_libraries_of_a_gpu_run_out_of_memory(error: RuntimeError) -> None:
    assert is_out_of_memory(error)


def test_other_errors_are_not() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.ones(2) @ torch.ones(3)
    assert not is_out_of_memory(found.value)
    try:
        raise _error_of(2**50)
    except RuntimeError:
        with pytest.raises(RuntimeError) as unrelated:
            raise RuntimeError("the fallback failed for another reason") from None
    assert not is_out_of_memory(unrelated.value)


def test_ranks_of_a_host_share_its_memory() -> None:
    alone = read_device_memory(World(0, 1, 0, 1, "test"), "cpu")
    shared = read_device_memory(World(0, 4, 0, 4, "test"), "cpu")
    assert alone is not None
    assert shared is not None
    assert shared.total_bytes == alone.total_bytes // 4
    assert 0 < shared.free_bytes < alone.free_bytes <= alone.total_bytes


def test_the_peak_of_a_cpu_is_growth_of_resident_memory() -> None:
    peak = PeakMemory("cpu", World(0, 1, 0, 1, "test"))
    before = peak.num_bytes()
    kept = torch.ones(before + 256 * MIB, dtype=torch.uint8)
    assert before + 200 * MIB < peak.num_bytes() < before + GIB
    del kept
    assert peak.num_bytes() > before + 200 * MIB


def test_the_peak_of_a_gpu_is_what_is_reserved_and_what_libraries_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this rank's GPU, since the object was made: an earlier run of the process, and other processes, do not count."""
    peaks, free, reserved = {1: 5 * GIB}, [60 * GIB], [2 * GIB]
    fakes = {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "reset_peak_memory_stats": lambda index: peaks.update({index: reserved[0]}),
        "max_memory_reserved": lambda index: peaks[index],
        "memory_reserved": lambda index: {1: reserved[0]}[index],
        "mem_get_info": lambda index: {1: (free[0], 80 * GIB)}[index],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    peak = PeakMemory("cuda", World(1, 2, 1, 2, "test"))
    assert peak.num_bytes() == 2 * GIB
    # Of 30 GiB that are taken now, torch has 27 and NCCL 3; torch had one GiB more before.
    free[0], reserved[0], peaks[1] = 30 * GIB, 29 * GIB, 30 * GIB
    assert peak.num_bytes() == 33 * GIB
