"""Measures how far the clock of each host is from the clock of rank zero's host.

Hosts ask rank zero for its time through the ranks' store. An answer is wrong by at most half the round trip, so the
shortest of several round trips is used (Cristian, "Probabilistic clock synchronization", 1989).
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.system.processes import boot_id

_ROUND_TRIPS = 20


@dataclass(frozen=True)
class HostClock:
    """The clock of this process's host; `shift_ns` is added to the system's time."""

    host: str = field(default_factory=lambda: boot_id() or socket.gethostname())
    """Identifies the clock: the same text for all processes that share it."""
    shift_ns: int = 0

    def now(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns() + self.shift_ns


class MeasuredOffset(NamedTuple):
    """Nanoseconds to add to a clock to get rank zero's time, and the maximum error."""

    uncertainty: int = 0
    offset: int = 0

    def summary(self) -> dict[str, float]:
        """Seconds for `summary.json`."""
        return {"offset_seconds": self.offset / 1e9, "uncertainty_seconds": self.uncertainty / 1e9}


def measure_offset(store: dist.Store, clock: HostClock) -> MeasuredOffset:
    """Measure the offset of `clock` from rank zero's. Collective; the first rank of each host measures for the host."""
    rank, hosts = dist.get_rank(), all_gather_object(clock.host)
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[0]]
    measured = MeasuredOffset()
    if rank == 0:
        _answer(store, leaders, clock)
    elif rank in leaders:
        measured = min(_ask(store, f"{rank}/{trip}", clock) for trip in range(_ROUND_TRIPS))
    return all_gather_object(measured)[hosts.index(hosts[rank])]


def _ask(store: dist.Store, trip: str, clock: HostClock) -> MeasuredOffset:
    asked = clock.now()
    store.set(f"asked/{trip}", "")
    answer = int(store.get(f"answered/{trip}").decode())
    answered = clock.now()
    return MeasuredOffset((answered - asked + 1) // 2, answer - (asked + answered) // 2)


def _answer(store: dist.Store, leaders: Sequence[int], clock: HostClock) -> None:
    for trip in (f"{leader}/{number}" for leader in leaders for number in range(_ROUND_TRIPS)):
        store.wait([f"asked/{trip}"])
        store.set(f"answered/{trip}", str(clock.now()))
