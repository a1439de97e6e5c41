"""The process that writes a rank's part of each checkpoint to disk while training continues.

It is started as `python -m ds_finetune.checkpoint.part_writer_process FD`. Jobs (messages.py) arrive on standard input,
and replies go to standard output. It does not import torch: it copies bytes from shared memory (file descriptor FD) to
the file. On the leader (folder.py) it also waits for the parts of the other ranks and commits the checkpoint.
"""

import mmap
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ds_finetune.checkpoint.commit import byte_pieces, commit, mark_part_written, remove_checkpoint, write_checksummed
from ds_finetune.checkpoint.messages import JOBS, CommitJob, JobDone, RemoveJob, ReserveJob, StopWaiting, WriteJob
from ds_finetune.system.process_messages import MessageReader, ProcessMessage, send

ORPHAN_SECONDS = 10.0
"""Seconds that this process, after its rank has exited, waits for parts of other ranks that do not grow."""


class _JobQueue:
    """Jobs in the order of arrival; `is_closed` is true once the rank has exited."""

    def __init__(self) -> None:
        self._reader = MessageReader(0, JOBS, peer="the rank")
        self._deferred = deque[ProcessMessage]()

    @property
    def is_closed(self) -> bool:
        return self._reader.is_closed

    def next(self) -> ProcessMessage | None:
        """Wait for the next job; None once the rank has exited."""
        return self._deferred.popleft() if self._deferred else self._reader.next()

    def is_told_to_stop(self) -> bool:
        """Whether a StopWaiting has arrived; any other job that has arrived is kept for later."""
        job = self._reader.next(0)
        if job is not None and not isinstance(job, StopWaiting):
            self._deferred.append(job)
        return isinstance(job, StopWaiting)


def main() -> None:
    """Run jobs until the rank has exited."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        # Launchers, schedulers and a closing terminal send signals to every process of a job. Only the rank decides
        # when this process ends.
        signal.signal(name, signal.SIG_IGN)
    memory, jobs = int(sys.argv[1]), _JobQueue()
    while (job := jobs.next()) is not None:
        if isinstance(job, StopWaiting):
            # The request to stop waiting came after the checkpoint commit had ended.
            continue
        error = ""
        try:
            match job:
                case ReserveJob():
                    # Allocate the pages now: the first write to a page of shared memory takes three times as long as
                    # later ones.
                    os.posix_fallocate(memory, 0, max(1, job.num_bytes))
                case WriteJob():
                    _write_part_file(Path(job.part), job.num_bytes, memory)
                    if job.commit is not None:
                        _commit(job.commit, jobs)
                case RemoveJob():
                    for folder in job.folders:
                        remove_checkpoint(Path(folder))
        except Exception as failed:  # noqa: BLE001 - the rank reports whatever went wrong, and this process continues
            error = f"{type(failed).__name__}: {failed}"
        send(sys.stdout.fileno(), JobDone(job.kind, error))


def _write_part_file(part: Path, num_bytes: int, memory: int) -> None:
    # The map is not closed: after a failure the traceback still refers to it, and close() would raise another error.
    staged = mmap.mmap(memory, num_bytes, access=mmap.ACCESS_READ)
    mark_part_written(part, write_checksummed(part, byte_pieces(memoryview(staged))))


def _commit(job: CommitJob, jobs: _JobQueue) -> None:
    partial = Path(job.partial)
    commit(partial, job.manifest, job.texts, job.linked, _wait_condition(jobs, partial))


def _wait_condition(jobs: _JobQueue, partial: Path) -> Callable[[], bool]:
    """Returns a function that says whether to wait longer for the parts of other ranks: until the rank sends
    StopWaiting or, after the rank has exited, while the parts still grow.
    """
    size, since = -1, time.monotonic()

    def keep_waiting() -> bool:
        if not jobs.is_closed:
            return not jobs.is_told_to_stop()
        nonlocal size, since
        now = sum(entry.stat().st_size for entry in os.scandir(partial))
        if now != size:
            size, since = now, time.monotonic()
        return time.monotonic() - since < ORPHAN_SECONDS

    return keep_waiting


if __name__ == "__main__":
    main()
