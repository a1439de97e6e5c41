"""Runs with a fault, their ranks started one by one as pdsh, srun and ssh do: nothing stands above them that could end
the others.
"""

import os
import re
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from ds_finetune.runs.status import RunStatus, seen_status
from tests.cluster.watchdog.faulty import CONTINUED
from tests.conftest import ROOT
from tests.forks import Forked, Forkserver
from tests.running import tiny_task

SECONDS = 200
LIMIT_SECONDS = 4
FAULTY = str(ROOT / "tests" / "cluster" / "watchdog" / "faulty.py")
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Faulty:
    """What became of a run: exit codes, seconds from the fault to each rank's end, output by rank."""

    folder: Path
    codes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    @property
    def report(self) -> str:
        """The report of the watchdog."""
        return (self.folder / "run" / "watchdog" / "report.txt").read_text()

    @property
    def status(self) -> RunStatus:
        """The state of the run as an observer sees it, and why."""
        return seen_status(self.folder / "run")

    def stacks(self, rank: int) -> str:
        """StackFile of a rank."""
        return (self.folder / "run" / "watchdog" / f"rank-{rank:05}.txt").read_text()


def faulty(
    folder: Path,
    fault: str,
    *,
    rank: int = 1,
    step: int = 4,
    overrides: tuple[str, ...] = (),
    pause_seconds: float = 0.0,
) -> Faulty:
    """Two ranks, one of which has a fault at a step; returns once both have ended, which they must within SECONDS.

    With `pause_seconds` both are stopped for that time once the fault has begun.
    """
    run_file = tiny_task(folder)
    defaults = (f"watchdog.limit={LIMIT_SECONDS} seconds", "train.for=12 steps")
    given = {override.partition("=")[0]: override for override in (*defaults, *overrides)}.values()
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environ[CONTINUED] = str(folder / "continued")
    logs = [folder / f"rank-{place}.log" for place in (0, 1)]
    program = [FAULTY, fault, str(rank), str(step), str(run_file), *given]
    ranks = [
        Forkserver.get().start(
            program, environ | {"RANK": str(place), "LOCAL_RANK": str(place)}, ranks=0, out=logs[place], err=logs[place]
        )
        for place in (0, 1)
    ]
    if pause_seconds:
        _pause(ranks, logs[rank], pause_seconds)
        (folder / "continued").touch()
    ended = _ended(ranks)
    done = Faulty(folder, codes=[process.wait(0) for process in ranks], printed=[log.read_text() for log in logs])
    began = re.search(r"^FAULT ([\d.]+)", done.printed[rank], re.MULTILINE)
    done.seconds = [moment - float(began[1]) for moment in ended] if began else []
    return done


def _pause(ranks: list[Forked], log: Path, seconds: float) -> None:
    until = time.monotonic() + SECONDS
    while "FAULT" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in ranks:
            os.kill(process.pid, number)
        time.sleep(seconds if number == signal.SIGSTOP else 0)


def _ended(ranks: list[Forked]) -> list[float]:
    """When each process ended, or was ended here because it had not."""
    until, ended = time.monotonic() + SECONDS, [0.0] * len(ranks)
    while not all(ended) and time.monotonic() < until:
        for place, process in enumerate(ranks):
            if not ended[place] and process.poll() is not None:
                ended[place] = time.time()
        time.sleep(0.05)
    for process in ranks:
        process.kill()
    assert all(ended), f"still running after {SECONDS} s"
    return ended
