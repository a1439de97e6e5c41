"""Offsets of clocks, measured by ranks that are threads with clocks of their own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from ds_finetune.runs.timeline.clock import ClockAlignment, HostClock, MeasuredOffset, measure_offset


def test_shifted_clocks_are_measured_once_for_each_host() -> None:
    clocks = [HostClock("a"), HostClock("a"), HostClock("b", 7_000_000_000), HostClock("c", -50_000_000)]
    clocks.append(HostClock("b", 7_000_000_000))
    hosts = [clock.host for clock in clocks]
    store = dist.HashStore()

    with ThreadPoolExecutor(len(clocks)) as ranks:
        measured = list(ranks.map(lambda rank: measure_offset(store, rank, hosts, clocks[rank]), range(len(clocks))))

    assert measured[0].offset == measured[1].offset == 0
    assert measured[4] == measured[2]
    for offset, clock in zip(measured, clocks, strict=True):
        assert abs(offset.offset + clock.shift_ns) <= offset.uncertainty
        assert offset.uncertainty < 10_000_000
    assert store.num_keys() == 0


def test_offsets_that_change_are_interpolated() -> None:
    alignment = ClockAlignment(MeasuredOffset(1000, 50, 3), MeasuredOffset(2000, 70, 4))
    assert [alignment.to_rank_zero(at) for at in (1000, 1500, 2000)] == [1050, 1560, 2070]
    assert alignment.uncertainty_seconds == pytest.approx(4e-9)
    assert alignment.drift_seconds == pytest.approx(20e-9)
