"""A rank's side of writing: bytes copied into shared memory and handed to the writer process, or written at once."""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import ds_finetune
from ds_finetune.checkpoint.files import ChecksummedFile, mark_part_written
from ds_finetune.checkpoint.part_writer import STOP_WAITING
from ds_finetune.units import MIB

_BUFFER_BYTES = 16 * MIB
_PARTING_SECONDS = 5.0


class WriterProcess:
    """The process of `writer.py` and the memory it reads from; jobs are answered in order."""

    def __init__(self, inherited: Sequence[int] = ()) -> None:
        self._inherited = tuple(inherited)
        # Not in /dev/shm, which containers keep small: an anonymous file is bounded by memory alone.
        self._memory = os.memfd_create("checkpoint")
        self._map: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._sent = self._answered = 0
        self._buffer = b""

    def start(self) -> None:
        """Start the process."""
        package = str(Path(ds_finetune.__file__).parents[1])
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
        command = [sys.executable, "-m", "ds_finetune.checkpoint.part_writer", str(self._memory)]
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._memory, *self._inherited],
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def send(self, do: str, **job: Any) -> None:  # noqa: ANN401 - plain values
        """Ask for a job; a process that is gone is noticed by `errors`."""
        self._sent += 1
        self._tell({"do": do, **job})

    def stop_waiting(self) -> None:
        """Let a commit that waits for the parts of other ranks end with an error."""
        self._tell({"do": STOP_WAITING})

    def _tell(self, tree: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(tree).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def is_busy(self) -> bool:
        """Whether a job is not answered yet."""
        return self._answered < self._sent

    def errors(self) -> list[str]:
        """Take the answers there are; what went wrong in writing or reserving, or that the process is gone.

        A checkpoint that could not be taken away is no error of a save; it is tried again after the next.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        self._buffer += self._process.stdout.read() or b""
        *lines, self._buffer = self._buffer.split(b"\n")
        answers = [json.loads(line) for line in lines]
        self._answered += len(answers)
        found = [answer["error"] for answer in answers if answer["error"] and answer["do"] != "remove"]
        if self._process.poll() is not None and self.is_busy:
            self._answered = self._sent
            found.append(f"the writer process ended with code {self._process.returncode}")
            self.start()
        return found

    def begin(self, num_bytes: int) -> None:
        """PartSink: make place for a part."""
        if self._map is None or len(self._map) < num_bytes:
            os.ftruncate(self._memory, num_bytes)
            self._map = mmap.mmap(self._memory, num_bytes)
        self._filled = 0

    def write(self, values: torch.Tensor) -> None:
        """PartSink: copy the bytes of a 1-D tensor, from whatever device."""
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
        """Let the process end after its last job."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PARTING_SECONDS)
        os.close(self._memory)


class FilePartSink:
    """Writes a part synchronously, from where the values are, with one buffer: for states too large to copy."""

    def __init__(self, part: Path) -> None:
        self._part = part
        self._file = ChecksummedFile(part)

    def begin(self, num_bytes: int) -> None:
        """Nothing to make: the file grows."""

    def write(self, values: torch.Tensor) -> None:
        """Write the bytes of a 1-D tensor."""
        for piece in values.split(_BUFFER_BYTES // values.element_size()):
            self._file.write(memoryview(piece.cpu().view(torch.uint8).numpy()))

    def finish(self) -> None:
        """The part is on disk, and says so."""
        mark_part_written(self._part, self._file.close())
