"""Clocks of hosts, how far each is from that of rank zero's host, and sets of spans of time.

Hosts ask rank zero for its time through the store of the ranks. Half of a round trip is the most by which an answer can
be wrong, so the shortest of several counts (Cristian, "Probabilistic clock synchronization", 1989). The offset is
measured before and after the profiled steps, because clocks also differ in speed.
"""

import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from ds_finetune.system.processes import boot_id

_ROUND_TRIPS = 20
Span = tuple[int, int]
"""Begin and end in nanoseconds."""
Spans = list[Span]
"""A set of times: sorted and disjoint."""


@dataclass(frozen=True)
class HostClock:
    """The clock of this process's host, `shift_ns` ahead of the system's time."""

    host: str = field(default_factory=lambda: boot_id() or socket.gethostname())
    """The same text for all processes that share a clock."""
    shift_ns: int = 0

    def now(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns() + self.shift_ns


@dataclass(frozen=True)
class MeasuredOffset:
    """At the time `at` of a clock, `offset` has to be added for the time of rank zero; wrong by at most `uncertainty`.

    All are in nanoseconds.
    """

    at: int
    offset: int = 0
    uncertainty: int = 0


@dataclass(frozen=True)
class ClockAlignment:
    """Offsets of a clock before and after the profiled steps."""

    first: MeasuredOffset
    last: MeasuredOffset

    def to_rank_zero(self, at: int) -> int:
        """The time of rank zero at the time `at` of this clock, where offsets change evenly."""
        seconds = self.last.at - self.first.at
        share = (at - self.first.at) / seconds if seconds else 0.0
        return at + self.first.offset + round((self.last.offset - self.first.offset) * share)

    @property
    def uncertainty_seconds(self) -> float:
        """The most by which an aligned time can be wrong, if the clock ran evenly."""
        return max(self.first.uncertainty, self.last.uncertainty) / 1e9

    @property
    def drift_seconds(self) -> float:
        """How far the clock has moved from that of rank zero during the profiled steps."""
        return (self.last.offset - self.first.offset) / 1e9


def measure_offset(store: dist.Store, rank: int, hosts: Sequence[str], clock: HostClock) -> MeasuredOffset:
    """How far `clock` is from that of rank zero; every rank calls it with the hosts of all ranks.

    The first rank of each host measures for it, one host at a time. Ranks of rank zero's host have its clock.
    """
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[0]]
    if rank == 0:
        for leader in leaders:
            _answer(store, leader, clock)
    if hosts[rank] == hosts[0]:
        return MeasuredOffset(clock.now())
    leader = hosts.index(hosts[rank])
    if rank == leader:
        measured = min((_ask(store, leader, trip, clock) for trip in range(_ROUND_TRIPS)), key=lambda m: m.uncertainty)
        for other in (other for other, host in enumerate(hosts) if host == hosts[rank] and other != rank):
            store.set(f"offset/{other}", f"{measured.at} {measured.offset} {measured.uncertainty}")
        return measured
    text = store.get(f"offset/{rank}").decode()
    store.delete_key(f"offset/{rank}")
    return MeasuredOffset(*map(int, text.split()))


def _ask(store: dist.Store, leader: int, trip: int, clock: HostClock) -> MeasuredOffset:
    asked = clock.now()
    store.set(f"asked/{leader}/{trip}", "")
    answer = int(store.get(f"answered/{leader}/{trip}").decode())
    answered = clock.now()
    store.delete_key(f"answered/{leader}/{trip}")
    middle = (asked + answered) // 2
    return MeasuredOffset(middle, answer - middle, (answered - asked + 1) // 2)


def _answer(store: dist.Store, leader: int, clock: HostClock) -> None:
    for trip in range(_ROUND_TRIPS):
        store.wait([f"asked/{leader}/{trip}"])
        store.set(f"answered/{leader}/{trip}", str(clock.now()))
        store.delete_key(f"asked/{leader}/{trip}")


def union(spans: Iterable[Span]) -> Spans:
    """The times in any of `spans`, which may overlap and have any order; empty ones are left out."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def intersection(one: Spans, other: Spans) -> Spans:
    """The times in both."""
    common: Spans = []
    first = second = 0
    while first < len(one) and second < len(other):
        begin, end = max(one[first][0], other[second][0]), min(one[first][1], other[second][1])
        if begin < end:
            common.append((begin, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return common


def difference(one: Spans, other: Spans) -> Spans:
    """The times in `one` and not in `other`."""
    left: Spans = []
    at = 0
    for span in one:
        begin, end = span
        while at < len(other) and other[at][1] <= begin:
            at += 1
        number = at
        while number < len(other) and other[number][0] < end:
            if begin < other[number][0]:
                left.append((begin, other[number][0]))
            begin = max(begin, other[number][1])
            number += 1
        if begin < end:
            left.append((begin, end))
    return left


def seconds_in(spans: Spans) -> float:
    """The sum of the lengths of `spans`."""
    return sum(end - begin for begin, end in spans) / 1e9
