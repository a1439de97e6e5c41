"""Locks host memory in place for a GPU, which then copies into it directly and not by way of a small buffer."""

import ctypes
import mmap
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


class PinnedMap:
    """Keeps one memory map at a time registered with CUDA; does nothing without a GPU.

    Pages are locked when they are registered, which takes about as long as to fill them once, in the first save.
    """

    def __init__(
        self,
        cudart: Any = None,  # noqa: ANN401 - CUDA's runtime, as `torch.cuda.cudart()` gives it
        run_kernel: Callable[[], object] = lambda: None,
    ) -> None:
        self._cudart, self._run_kernel = cudart, run_kernel
        self._address = 0

    @classmethod
    def of_device(cls) -> "PinnedMap":
        """For the GPU that this process computes on, if it does."""
        if not torch.cuda.is_initialized():
            return cls()
        return cls(torch.cuda.cudart(), lambda: torch.zeros(1, device="cuda"))

    def register(self, memory: mmap.mmap) -> None:
        """Lock `memory`; where the system refuses, copies stay slow, and a warning tells why."""
        assert not self._address, "`release` comes before another map"
        if self._cudart is None:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        error = self._cudart.cudaHostRegister(address, len(memory), 0)
        if int(error):
            # CUDA keeps the error until someone asks for it: torch, which would raise it from its next kernel.
            with suppress(RuntimeError):
                self._run_kernel()
            warnings.warn(
                f"{len(memory):,} bytes for checkpoints cannot be locked in memory (CUDA error {int(error)}), so "
                "copying them from the GPU takes longer; raise `ulimit -l`",
                stacklevel=2,
            )
            return
        self._address = address

    def release(self) -> None:
        """Unlock the memory again, before it is unmapped."""
        if self._address:
            self._cudart.cudaHostUnregister(self._address)
            self._address = 0
