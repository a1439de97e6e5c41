"""Writes a rank's part of a checkpoint from the bytes that `part_storage.serialise_part` yields.

`WriterProcess` copies them to shared memory, from which a separate process writes the file while training continues.
With a GPU, this memory is pinned (`PinnedMap`). `write_part` writes the file before training continues.
"""

import ctypes
import mmap
import os
import signal
import subprocess
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ds_finetune.checkpoint.commit import Job, JobDone, RemoveJob, StopWaiting, mark_part_written, write_checksummed
from ds_finetune.config.units import MIB
from ds_finetune.system.processes import python_module, with_package

_SIGNALS_OF_A_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class PinnedMap:
    """Pins a memory map for faster copies from the GPU; does nothing if this process uses no GPU. At most one map is
    pinned at a time. The first save pins it, which takes about as long as filling its pages once.
    """

    def __init__(self) -> None:
        # `cudart` would start CUDA in a process that does not use it.
        self._cudart: Any = torch.cuda.cudart() if torch.cuda.is_initialized() else None
        self._address = 0

    def register(self, memory: mmap.mmap) -> None:
        """Pin `memory`. If the system refuses, a warning gives the reason, and copies from the GPU are slower."""
        assert not self._address, "`release` comes before another map"
        if self._cudart is None:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        error = self._cudart.cudaHostRegister(address, len(memory), 0)
        if int(error):
            # CUDA would raise the pinning error again from torch's next kernel, so a kernel is run here to clear it.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            warnings.warn(
                f"{len(memory):,} bytes for checkpoints cannot be locked in memory (CUDA error {int(error)}), so "
                "copying them from the GPU takes longer; raise `ulimit -l`",
                stacklevel=2,
            )
            return
        self._address = address

    def release(self) -> None:
        """Unpin the memory that `register` pinned. This must precede unmapping it."""
        if self._address:
            self._cudart.cudaHostUnregister(self._address)
            self._address = 0


_BUFFER_BYTES = 16 * MIB
_CLOSE_SECONDS = 5.0


class WriterProcess:
    """Starts the writer process (part_writer_process.py), shares memory with it, and sends it jobs."""

    def __init__(self, inherited: Sequence[int] = ()) -> None:
        self._inherited = tuple(inherited)
        self._pinned = PinnedMap()
        # A memfd can be as large as the memory, while /dev/shm, the alternative, is small in containers.
        self._memory = os.memfd_create("checkpoint")
        self._map: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Job | StopWaiting, JobDone] | None = None
        self._num_sent = self._num_answered = 0

    def start(self) -> None:
        """Start the writer process."""
        self._pipe, child_end = Pipe()
        arguments = str(self._memory), str(child_end.fileno())
        # The writer process inherits blocked signals. Launchers, schedulers and closed terminals send signals to all
        # processes of a job, even while the writer starts, but only the rank decides when the writer ends.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_A_JOB)
        try:
            self._process = subprocess.Popen(
                python_module("ds_finetune.checkpoint.part_writer_process", *arguments),
                env=with_package(os.environ),
                stdin=subprocess.DEVNULL,
                pass_fds=[self._memory, child_end.fileno(), *self._inherited],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        child_end.close()

    def send(self, message: Job | StopWaiting) -> None:
        """Send a job to the writer process, or StopWaiting, so that it stops waiting for the part files of other ranks
        and its commit fails. An exit of the process is reported by `errors`, not here.
        """
        assert self._pipe is not None
        self._num_sent += not isinstance(message, StopWaiting)
        with suppress(ConnectionError):
            self._pipe.send(message)

    @property
    def is_busy(self) -> bool:
        """Whether the writer process has not yet replied to all jobs."""
        return self._num_answered < self._num_sent

    def errors(self) -> list[str]:
        """Read the writer's replies that have arrived, and return their errors. An exit of the process is also an
        error. A failed removal of a checkpoint is not, because it is tried again after the next save.
        """
        assert self._process is not None
        assert self._pipe is not None
        errors = []
        with suppress(EOFError, ConnectionError):
            while self._pipe.poll(0):
                done = self._pipe.recv()
                self._num_answered += 1
                if done.error and done.job is not RemoveJob:
                    errors.append(done.error)
        if self._process.poll() is not None and self.is_busy:
            self._num_answered = self._num_sent
            errors.append(f"the writer process ended with code {self._process.returncode}")
            self.start()
        return errors

    def copy(self, num_bytes: int, tensors: Iterable[torch.Tensor]) -> None:
        """Copy a rank's part of a checkpoint, `num_bytes` of 1-D tensors, to shared memory, which grows if needed."""
        if self._map is None or len(self._map) < num_bytes:
            self._pinned.release()
            os.ftruncate(self._memory, num_bytes)
            self._map = mmap.mmap(self._memory, num_bytes)
            self._pinned.register(self._map)
        offset = 0
        for values in tensors:
            if values.numel():
                torch.frombuffer(self._map, dtype=values.dtype, count=values.numel(), offset=offset).copy_(values)
                offset += values.nbytes
            # The tensor is released before the next state group is opened, so that only one group is in memory.
            del values

    def close(self) -> None:
        """Let the writer process end after its last job, and wait some seconds for that."""
        if self._process is not None and self._pipe is not None:
            self._pipe.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_SECONDS)
        self._pinned.release()
        os.close(self._memory)


def write_part(part: Path, tensors: Iterable[torch.Tensor]) -> None:
    """Write 1-D tensors on any device to the file `part` of a rank, and mark it as written, while training waits. This
    needs no shared memory, which may be too small for a large part.
    """

    def pieces() -> Iterator[memoryview]:
        for values in tensors:
            for piece in values.split(_BUFFER_BYTES // values.element_size()):
                yield memoryview(piece.cpu().view(torch.uint8).numpy())
            del values, piece

    mark_part_written(part, write_checksummed(part, pieces()))
