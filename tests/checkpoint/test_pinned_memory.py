"""Memory that a GPU copies checkpoints into is locked once for each map, and unlocked before the map goes."""

import mmap

import pytest
import torch

from ds_finetune.checkpoint.part_writers import PinnedMap, WriterProcess


class Runtime:
    """Answers like CUDA's runtime, and keeps what it was asked for."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.sizes: dict[int, int] = {}
        self.calls: list[str] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        self.calls.append(f"lock {size}")
        self.sizes[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(f"unlock {self.sizes.pop(address)}")
        return 0


def use_gpu(monkeypatch: pytest.MonkeyPatch, runtime: Runtime, *, uses_gpu: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_gpu)


def test_a_larger_part_gets_a_new_map(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    use_gpu(monkeypatch, runtime)
    process = WriterProcess()
    for size in (4096, 1024, 8192):
        process.copy(size, [torch.ones(size // 4)])
    process.close()
    assert runtime.calls == ["lock 4096", "unlock 4096", "lock 8192", "unlock 8192"]


def test_memory_that_cannot_be_locked_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the error, which CUDA keeps, is not raised by the training's next kernel."""
    kernels: list[str] = []

    def run_kernel(_: int, device: str) -> None:
        kernels.append(device)
        raise torch.AcceleratorError("CUDA error: out of memory")

    use_gpu(monkeypatch, Runtime(error=2))
    monkeypatch.setattr(torch, "zeros", run_kernel)
    pinned = PinnedMap()
    with pytest.warns(UserWarning, match="4,096 bytes for checkpoints cannot be locked in memory \\(CUDA error 2\\)"):
        pinned.register(mmap.mmap(-1, 4096))
    assert kernels == ["cuda"]
    pinned.release()


def test_memory_is_locked_where_the_process_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.cudart()` would start CUDA in a process that does not use it."""
    runtime = Runtime()
    for uses_gpu, calls in ((False, []), (True, ["lock 4096", "unlock 4096"])):
        use_gpu(monkeypatch, runtime, uses_gpu=uses_gpu)
        pinned = PinnedMap()
        pinned.register(mmap.mmap(-1, 4096))
        pinned.release()
        assert runtime.calls == calls
