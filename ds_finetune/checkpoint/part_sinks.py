"""Sinks that take the bytes of a rank's part from `part_storage.serialise_part`.

`WriterProcess` copies them to shared memory, from which a process writes the file while training continues.
`FilePartSink` writes them to the file before training continues.
"""

import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

import ds_finetune
from ds_finetune.checkpoint.files import ChecksummedFile, mark_part_written
from ds_finetune.checkpoint.messages import JobDone, RemoveJob, StopWaiting
from ds_finetune.checkpoint.pinned_memory import PinnedMap
from ds_finetune.config.units import MIB
from ds_finetune.system.process_messages import MessageReader, ProcessMessage, send

_BUFFER_BYTES = 16 * MIB
_CLOSE_SECONDS = 5.0


class WriterProcess:
    """Starts the process of `part_writer_process.py` and shares memory with it; it answers jobs in order."""

    def __init__(self, inherited: Sequence[int] = (), pinned: PinnedMap | None = None) -> None:
        self._inherited = tuple(inherited)
        self._pinned = pinned or PinnedMap.of_device()
        # Not a file in /dev/shm, which is small in containers. Only the size of memory limits a memfd.
        self._memory = os.memfd_create("checkpoint")
        self._map: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: MessageReader[JobDone] | None = None
        self._num_sent = self._num_answered = 0

    def start(self) -> None:
        """Start the process."""
        package = str(Path(ds_finetune.__file__).parents[1])
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
        command = [sys.executable, "-m", "ds_finetune.checkpoint.part_writer_process", str(self._memory)]
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._memory, *self._inherited],
        )
        assert self._process.stdout is not None
        self._answers = MessageReader(self._process.stdout.fileno(), [JobDone], peer="the checkpoint writer")

    def send(self, job: ProcessMessage) -> None:
        """Send a job; a process that has exited is noticed by `errors`, not here."""
        self._num_sent += 1
        self._send(job)

    def stop_waiting(self) -> None:
        """End a commit that waits for the parts of other ranks, with an error."""
        self._send(StopWaiting())

    def _send(self, message: ProcessMessage) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        send(self._process.stdin.fileno(), message)

    @property
    def is_busy(self) -> bool:
        """Whether there is a job without an answer."""
        return self._num_answered < self._num_sent

    def errors(self) -> list[str]:
        """Read the answers that have arrived, and return their errors; a process that has exited is an error too.

        A checkpoint that could not be removed is no error of a save: its removal is tried again after the next save.
        """
        assert self._process is not None
        assert self._answers is not None
        errors = []
        while (done := self._answers.next(0)) is not None:
            self._num_answered += 1
            if done.error and done.job != RemoveJob.kind:
                errors.append(done.error)
        if self._process.poll() is not None and self.is_busy:
            self._num_answered = self._num_sent
            errors.append(f"the writer process ended with code {self._process.returncode}")
            self.start()
        return errors

    def begin(self, num_bytes: int) -> None:
        """PartSink: prepare shared memory for a part."""
        if self._map is None or len(self._map) < num_bytes:
            self._pinned.release()
            os.ftruncate(self._memory, num_bytes)
            self._map = mmap.mmap(self._memory, num_bytes)
            self._pinned.register(self._map)
        self._filled = 0

    def write(self, values: torch.Tensor) -> None:
        """PartSink: copy the bytes of a 1-D tensor on any device."""
        assert self._map is not None
        if values.numel() == 0:
            return
        torch.frombuffer(self._map, dtype=values.dtype, count=values.numel(), offset=self._filled).copy_(values)
        self._filled += values.numel() * values.element_size()

    @property
    def num_bytes(self) -> int:
        """Bytes of the part that was copied last."""
        return self._filled

    def close(self) -> None:
        """Let the process end after its last job, and wait some seconds for that."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_SECONDS)
        self._pinned.release()
        os.close(self._memory)


class FilePartSink:
    """Writes a part synchronously through a small buffer, for states that are too large to copy."""

    def __init__(self, part: Path) -> None:
        self._part = part
        self._file = ChecksummedFile(part)

    def begin(self, num_bytes: int) -> None:
        """PartSink: do nothing, because the file grows."""

    def write(self, values: torch.Tensor) -> None:
        """PartSink: write the bytes of a 1-D tensor."""
        for piece in values.split(_BUFFER_BYTES // values.element_size()):
            self._file.write(memoryview(piece.cpu().view(torch.uint8).numpy()))

    def finish(self) -> None:
        """Flush the part to disk, and mark it as written."""
        mark_part_written(self._part, self._file.close())
