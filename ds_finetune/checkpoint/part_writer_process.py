"""Writer process, which writes a rank's part of each checkpoint to the disk while training continues.

It is started as `python -m ds_finetune.checkpoint.part_writer_process MEMORY PIPE`. Jobs (commit.py) arrive on the file
descriptor PIPE, and replies are sent over it. It does not import torch: it copies bytes from shared memory (file
descriptor MEMORY) to the file. On the leader (folder.py) it also waits for the part files of other ranks and commits
the checkpoint.
"""

import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from ds_finetune.checkpoint.commit import (
    Job,
    JobDone,
    RemoveJob,
    ReserveJob,
    StopWaiting,
    WriteJob,
    byte_pieces,
    commit,
    mark_part_written,
    remove_checkpoint,
    write_checksummed,
)

ORPHAN_SECONDS = 10.0
"""After its rank has exited, the writer process stops waiting if part files have not grown for so many seconds."""


class _JobQueue:
    """Jobs of the writer process in the order of arrival. `is_closed` is true after the rank has exited."""

    def __init__(self, rank: "Connection[JobDone, Job | StopWaiting]") -> None:
        self._rank = rank
        self._deferred = deque[Job]()
        self.is_closed = False

    def next(self) -> Job | StopWaiting | None:
        return self._deferred.popleft() if self._deferred else self._receive()

    def should_stop(self) -> bool:
        """Whether a StopWaiting message has arrived. Another job that has arrived instead is kept for later."""
        job = self._receive() if self._rank.poll(0) else None
        if job is not None and not isinstance(job, StopWaiting):
            self._deferred.append(job)
        return isinstance(job, StopWaiting)

    def _receive(self) -> Job | StopWaiting | None:
        try:
            return self._rank.recv()
        except (EOFError, OSError):
            self.is_closed = True
            return None


def main() -> None:
    """Run the jobs that this writer process gets from its rank, until the rank has exited."""
    memory = int(sys.argv[1])
    rank: Connection[JobDone, Job | StopWaiting] = Connection(int(sys.argv[2]))
    jobs = _JobQueue(rank)
    while (job := jobs.next()) is not None:
        if isinstance(job, StopWaiting):
            # The message to stop waiting arrived when the checkpoint was already committed.
            continue
        error = ""
        try:
            match job:
                case ReserveJob():
                    # Pages are allocated in advance, since the first write to a page takes three times as long.
                    os.posix_fallocate(memory, 0, max(1, job.num_bytes))
                case WriteJob():
                    # The memory map is not closed: a failure's traceback refers to it, so close() would raise.
                    staged = mmap.mmap(memory, job.num_bytes, access=mmap.ACCESS_READ)
                    mark_part_written(job.part, write_checksummed(job.part, byte_pieces(memoryview(staged))))
                    if job.commit is not None:
                        commit(job.commit, _wait_condition(jobs, job.commit.partial))
                case RemoveJob():
                    for folder in job.folders:
                        remove_checkpoint(folder)
        except Exception as failed:  # noqa: BLE001 - the rank reports whatever went wrong, and this process continues
            error = f"{type(failed).__name__}: {failed}"
        with suppress(ConnectionError):
            rank.send(JobDone(type(job), error))


def _wait_condition(jobs: _JobQueue, partial: Path) -> Callable[[], bool]:
    """Make a function that says whether to keep waiting for the part files of other ranks. While this rank runs, the
    wait ends when it sends StopWaiting. After it has exited, the wait ends when the files stop growing.
    """
    size, since = -1, time.monotonic()

    def keep_waiting() -> bool:
        if not jobs.is_closed:
            return not jobs.should_stop()
        nonlocal size, since
        now = sum(entry.stat().st_size for entry in os.scandir(partial))
        if now != size:
            size, since = now, time.monotonic()
        return time.monotonic() - since < ORPHAN_SECONDS

    return keep_waiting


if __name__ == "__main__":
    main()
