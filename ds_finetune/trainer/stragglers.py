"""Finds slow ranks: compares the step times of ranks, without their waits in collectives."""

import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ds_finetune.cluster.watchdog.progress import RECENT_STEPS, RankProgress
from ds_finetune.engine.groups.collectives import all_gather_object, all_gather_scalar
from ds_finetune.observers.record import Observer, StepRecord

_NOTICEABLE_SECONDS = 0.05
"""Differences between ranks of fewer seconds than this are noise, e.g. in small models."""
_LEAST_STEPS = 5
"""Minimum number of steps in a median, so that a rank that pauses in a single step does not count as slow."""


@dataclass
class Stragglers(Observer):
    """Every `every` steps, adds `perf/straggler_ratio`: the step time of the slowest rank over the median of all ranks.
    The step time of a rank is the median over its last `every` steps, at least five, without the time in collectives,
    in which the other ranks wait for the slow one. All ranks gather the times at these steps. `record.slow` names a
    rank whose ratio is `ratio` or more.
    """

    progress: RankProgress
    every: int
    ratio: float
    hosts: list[str] = field(default_factory=list)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the ratio to the record every `every` steps, at which this call is collective."""
        window = max(self.every, _LEAST_STEPS)
        if record.step % self.every or len(self.progress.own_seconds) < min(window, RECENT_STEPS):
            return record
        self.hosts = self.hosts or all_gather_object(socket.gethostname())
        seconds = all_gather_scalar(statistics.median(list(self.progress.own_seconds)[-window:]))
        slowest, ratio = straggler(seconds)
        record = replace(record.with_values({"perf/straggler_ratio": ratio}), rank_seconds=tuple(seconds))
        if ratio < self.ratio or seconds[slowest] - statistics.median_low(seconds) < _NOTICEABLE_SECONDS:
            return record
        return replace(record, slow=f"rank {slowest} (host {self.hosts[slowest]}) {ratio:.1f}x the median")


def straggler(seconds: Sequence[float]) -> tuple[int, float]:
    """The slowest rank, and its seconds over the median of all ranks (with two ranks, over the faster one's)."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    median = statistics.median_low(seconds)
    return slowest, seconds[slowest] / median if median else 1.0
