"""A rank that takes longer than the others is named on the progress line."""

import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ds_finetune.engine.collectives import all_gather_object, all_gather_scalar
from ds_finetune.observers.record import StepRecord
from ds_finetune.watchdog.progress import RECENT_STEPS, RankProgress

_NOTICEABLE_SECONDS = 0.05
"""Differences of a step's time below this are the noise of small models."""
_LEAST_STEPS = 5
"""A pause of one step is none of a rank that is slow."""


@dataclass
class Stragglers:
    """Every `every` steps adds `perf/straggler_ratio`: the time of the slowest rank over the median, each without its
    time in collectives.

    A rank's time is the median of its last `every` steps, five at least.
    What a rank does while the others wait for it in a collective is all that makes it slow, and a step takes as long on
    each of them.
    One number of each rank is gathered at these steps. From `ratio` on the slow rank is named in `record.slow`.
    """

    progress: RankProgress
    every: int
    ratio: float
    hosts: list[str] = field(default_factory=list)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Collective at the steps it is time for."""
        window = max(self.every, _LEAST_STEPS)
        if record.step % self.every or len(self.progress.own_seconds) < min(window, RECENT_STEPS):
            return record
        self.hosts = self.hosts or all_gather_object(socket.gethostname())
        seconds = all_gather_scalar(statistics.median(list(self.progress.own_seconds)[-window:]))
        slowest, ratio = straggler(seconds)
        record = record.with_values({"perf/straggler_ratio": ratio})
        if ratio < self.ratio or seconds[slowest] - statistics.median_low(seconds) < _NOTICEABLE_SECONDS:
            return record
        return replace(record, slow=f"rank {slowest} (host {self.hosts[slowest]}) {ratio:.1f}x the median")

    def close(self) -> None:
        """Nothing is held back."""


def straggler(seconds: Sequence[float]) -> tuple[int, float]:
    """The rank that took longest, and how often the median (of two ranks the faster) its time is."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    median = statistics.median_low(seconds)
    return slowest, seconds[slowest] / median if median else 1.0
