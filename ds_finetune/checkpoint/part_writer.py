"""The process that writes a rank's part of a checkpoint while training continues.

It is started as `python -m ds_finetune.checkpoint.part_writer FD`.

Jobs come as JSON lines on stdin, an answer to each goes to stdout. It needs no torch: it sees bytes in shared memory
(file descriptor FD), writes them, and, on the rank that leads, waits for the parts of the others and commits.
"""

import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_finetune.checkpoint.files import (
    Manifest,
    byte_pieces,
    commit,
    mark_part_written,
    remove_checkpoint,
    write_checksummed,
)

STOP_WAITING = "stop_waiting"
"""Said while a job waits for the parts of other ranks, one of which has failed; it has no answer of its own."""
ORPHAN_SECONDS = 10.0
"""How long a writer whose rank is gone waits for the parts of other ranks while none of them grows."""


class _Inbox:
    """Lines of stdin, as they come; `is_closed` once the rank is gone."""

    def __init__(self) -> None:
        self._buffer = b""
        self._put_back: list[dict[str, Any]] = []
        self.is_closed = False

    def put_back(self, job: dict[str, Any]) -> None:
        """Keep a job for later."""
        self._put_back.append(job)

    def next(self, seconds: float | None) -> dict[str, Any] | None:
        """The next job, or None after `seconds` or when there will be none."""
        if self._put_back and seconds is None:
            return self._put_back.pop(0)
        while b"\n" not in self._buffer and not self.is_closed:
            ready, _, _ = select.select([0], [], [], seconds)
            if not ready:
                return None
            chunk = os.read(0, 65_536)
            self._buffer += chunk
            self.is_closed = not chunk
        line, newline, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line) if newline else None


def main() -> None:
    """Do jobs until the rank is gone."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        # Launchers, schedulers and a terminal that closes signal every process of a job; the rank decides when this one
        # ends.
        signal.signal(name, signal.SIG_IGN)
    memory, inbox = int(sys.argv[1]), _Inbox()
    while (job := inbox.next(None)) is not None:
        if job["do"] == STOP_WAITING:
            # The wait it was meant for had just ended.
            continue
        began = time.monotonic()
        try:
            error = _DO[job["do"]](job, memory, inbox)
        except Exception as failed:  # noqa: BLE001 - whatever went wrong is the rank's to say; this process goes on
            error = f"{type(failed).__name__}: {failed}"
        _answer({"do": job["do"], "error": error, "seconds": time.monotonic() - began})


def _answer(tree: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(tree) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _reserve(job: dict[str, Any], memory: int, _: _Inbox) -> str:
    """Take the memory now: a fresh page costs training three times what a known one does."""
    os.posix_fallocate(memory, 0, max(1, job["num_bytes"]))
    return ""


def _write(job: dict[str, Any], memory: int, inbox: _Inbox) -> str:
    part = Path(job["part"])
    # Not closed by hand: after a failure the traceback still holds pieces of it, and closing would hide the reason.
    staged = mmap.mmap(memory, job["num_bytes"], access=mmap.ACCESS_READ)
    mark_part_written(part, write_checksummed(part, byte_pieces(memoryview(staged))))
    return _commit(job["commit"], inbox) if job["commit"] else ""


def _commit(job: dict[str, Any], inbox: _Inbox) -> str:
    manifest = Manifest(**{**job["manifest"], "files": dict.fromkeys(job["parts"])})
    commit(Path(job["partial"]), manifest, job["texts"], job["beside"], _patience(inbox, Path(job["partial"])))
    return ""


def _patience(inbox: _Inbox, partial: Path) -> Callable[[], bool]:
    """Wait while the rank is there and says nothing; when it is gone, as long as others are seen to write."""
    size, since = -1, time.monotonic()

    def keep_waiting() -> bool:
        if not inbox.is_closed:
            job = inbox.next(0)
            if job is not None and job["do"] != STOP_WAITING:
                inbox.put_back(job)
            return job is None or job["do"] != STOP_WAITING
        nonlocal size, since
        now = sum(entry.stat().st_size for entry in os.scandir(partial))
        if now != size:
            size, since = now, time.monotonic()
        return time.monotonic() - since < ORPHAN_SECONDS

    return keep_waiting


def _remove(job: dict[str, Any], _: int, __: _Inbox) -> str:
    for folder in job["folders"]:
        remove_checkpoint(Path(folder))
    return ""


_DO: dict[str, Callable[[dict[str, Any], int, _Inbox], str]] = {
    "reserve": _reserve,
    "write": _write,
    "remove": _remove,
}


if __name__ == "__main__":
    main()
