"""Runs several jobs at once, one on each place, until none is left, or a signal or a failure ends them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_finetune.cluster.launch.attempt import handle_signals
from ds_finetune.runs.experiments.child_run import ChildRun, is_still_running
from ds_finetune.runs.experiments.places import Place

_POLL_SECONDS = 0.2


class ExperimentJob(ABC):
    """One run of an experiment: what is started, and what follows from its metrics and its end."""

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Folder of the job."""

    @abstractmethod
    def run_file(self) -> str:
        """Text of the run file."""

    def prepare(self) -> None:  # noqa: B027 - nothing by default
        """Called before the start, when no earlier run of this job is left."""

    def progressed(self, child: ChildRun) -> None:  # noqa: B027
        """Called now and then while it runs."""

    @abstractmethod
    def ended(self, child: ChildRun, code: int) -> None:
        """Called when it has ended."""


_Running = dict[int, tuple[ExperimentJob, ChildRun]]
"""Jobs and their runs by process id."""


class JobsInterruptedError(Exception):
    """A signal came; all runs have saved and ended."""


def run_jobs(jobs: Iterator[ExperimentJob], places: list[Place]) -> None:
    """Run all jobs; the iterator is asked for the next one when a place is free.

    On SIGINT, SIGTERM or SIGHUP the runs save and end, no job is told of its end, and JobsInterruptedError is raised; a
    second signal kills them. Where the iterator or a job raises an error, the runs save and end as well.
    """
    free, running = list(places), _Running()
    with _signals() as received:
        try:
            while _start_jobs(jobs, free, running, received) or running:
                free += _look_at(running, received)
        finally:
            _stop_all([child for _, child in running.values()], received)


def _start_jobs(jobs: Iterator[ExperimentJob], free: list[Place], running: _Running, received: list[int]) -> bool:
    """Start a job on each free place, which leaves `free`; returns whether the iterator had one for each."""
    while free:
        job = next(jobs, None)
        if job is None:
            return False
        while is_still_running(job.folder):
            _pause(received)
        job.prepare()
        child = ChildRun(job.folder, job.run_file(), free.pop())
        running[child.process.pid] = job, child
    return True


def _pause(received: list[int]) -> None:
    """Wait a moment; JobsInterruptedError after a signal."""
    time.sleep(_POLL_SECONDS)
    if received:
        raise JobsInterruptedError


def _look_at(running: _Running, received: list[int]) -> list[Place]:
    """Wait a moment; places of the runs that have ended, which leave `running`."""
    _pause(received)
    left = []
    for pid, (job, child) in list(running.items()):
        code = child.exit_code()
        job.progressed(child)
        if code is not None:
            del running[pid]
            left.append(child.place)
            job.ended(child, code)
    return left


def _stop_all(children: list[ChildRun], received: list[int]) -> None:
    """Let runs save and end; a further signal kills them."""
    known = len(received)
    for child in children:
        child.stop()
    while any(child.process.poll() is None for child in children):
        time.sleep(_POLL_SECONDS)
        if len(received) > known:
            for child in children:
                child.kill()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list to which signals are appended when they arrive."""
    received: list[int] = []
    with handle_signals(lambda number, _: received.append(number)):
        yield received
