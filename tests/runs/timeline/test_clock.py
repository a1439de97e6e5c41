"""Offsets of clocks, measured by ranks that are threads with clocks of their own."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local

import pytest
import torch.distributed as dist

from ds_finetune.runs.timeline import profiler
from ds_finetune.runs.timeline.profiler import HostClock, MeasuredOffset, measure_offset


def test_shifted_clocks_are_measured_once_for_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = [HostClock("a"), HostClock("a"), HostClock("b", 7_000_000_000), HostClock("c", -50_000_000)]
    clocks.append(HostClock("b", 7_000_000_000))
    store, barrier, this = dist.HashStore(), Barrier(len(clocks)), local()
    values: list[object] = [None] * len(clocks)

    def all_gather(mine: object) -> list[object]:
        values[this.rank] = mine
        barrier.wait()
        found = list(values)
        barrier.wait()
        return found

    def measure(rank: int) -> MeasuredOffset:
        this.rank = rank
        return measure_offset(store, clocks[rank])

    monkeypatch.setattr(profiler, "all_gather_object", all_gather)
    monkeypatch.setattr(dist, "get_rank", lambda: this.rank)
    with ThreadPoolExecutor(len(clocks)) as ranks:
        measured = list(ranks.map(measure, range(len(clocks))))

    assert measured[0] == measured[1] == (0, 0)
    assert measured[4] == measured[2]
    for offset, clock in zip(measured, clocks, strict=True):
        assert abs(offset.offset + clock.shift_ns) <= offset.uncertainty
        # One of the many round trips takes less than the wait of a thread for its turn.
        assert offset.uncertainty < 10_000_000
