"""Monitors of several ranks over one store. The test stands for their threads: it says when heartbeats are sent and
at which time a rank looks.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from ds_finetune.cluster.watchdog.endings import RankProcess, RunEnding, join
from ds_finetune.cluster.watchdog.monitor import Monitor
from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.config.sections import WatchdogConfig
from ds_finetune.runs.folder import REPORT
from ds_finetune.system.processes import began_at
from ds_finetune.system.world import World

LIMIT = 100.0
LIMITS = WatchdogConfig(limit="100 seconds", start="100 seconds", other="100 seconds")


class Ranks:
    """One rank for each of `machines`, in a step since now; ranks of equal machines are beside each other.

    `pids` are the processes of the ranks, that of the test where they are left out.
    """

    def __init__(self, folder: Path, machines: str = "aaa", pids: Sequence[int] = ()) -> None:
        self.folder = folder / "run"
        self.folder.mkdir(exist_ok=True)
        store, size = dist.HashStore(), len(machines)
        self.processes = [
            RankProcess(rank, f"host-{machine}", pid, began_at(pid), machine)
            for rank, (machine, pid) in enumerate(zip(machines, pids or [os.getpid()] * size, strict=True))
        ]
        worlds = [World(rank, size, rank, size, "test") for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            joined = list(pool.map(lambda world, own: join(store, world, own), worlds, self.processes))
        assert joined == [self.processes] * size
        self.monitors = [
            Monitor(RankProgress(rank, LIMITS), self.processes, store, self.folder) for rank in range(size)
        ]
        for monitor in self.monitors:
            monitor.progress.phase = "step"
            monitor._wake.set = monitor._exchange  # type: ignore[method-assign]
        self.beat()
        self.watch()
        self.beat()

    def beat(self, *ranks: int) -> None:
        """Let ranks, all where none is given, send a heartbeat and read those of others; rank zero reads last."""
        for rank in sorted(ranks or range(len(self.monitors)), reverse=True):
            self.monitors[rank]._exchange()

    def watch(self, *ranks: int, after: float = 0.0, is_answered: bool = True) -> None:
        """Let ranks, all where none is given, look at the others `after` seconds from now, until when the store has
        answered them.
        """
        for rank in ranks or range(len(self.monitors)):
            now = time.monotonic() + after
            if is_answered:
                self.monitors[rank]._answered_at = now
            self.monitors[rank]._watch(now)

    def hang(self, rank: int, *, others: Sequence[int]) -> None:
        """Let a rank find that it hangs, after which `others` send a heartbeat and rank zero compares all."""
        self.watch(rank, after=LIMIT + 1)
        self.beat(0)
        self.watch(0)
        self.monitors[0]._compare_at = time.monotonic()
        self.beat(*{0, *others})

    def fail(self, rank: int, line: str, *, is_secondary: bool, code: int = 1) -> RunEnding | None:
        """Let a rank report an error, for whose cause it does not wait."""
        self.monitors[rank]._ending_known.set()
        failure = RunEnding((), line, f"where\n{line}", code)
        return self.monitors[rank]._report_failure(failure, is_secondary=is_secondary)

    def ending(self, rank: int) -> RunEnding:
        """How the run ends, as a rank reads it in the store."""
        self.beat(rank)
        ending = self.monitors[rank]._stored_ending
        assert ending is not None
        return ending

    def report(self) -> str:
        """The report of the watchdog, once rank zero has taken note."""
        self.beat(0)
        self.watch(0)
        return (self.folder / REPORT).read_text()
