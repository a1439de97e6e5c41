"""How far the clock of each host is from that of rank zero's host.

Hosts ask rank zero for its time through the store of the ranks. Half of a round trip is the most by which an answer can
be wrong, so the shortest of several counts (Cristian, "Probabilistic clock synchronization", 1989).
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
    """The clock of this process's host, `shift_ns` ahead of the system's time."""

    host: str = field(default_factory=lambda: boot_id() or socket.gethostname())
    """The same text for all processes that share a clock."""
    shift_ns: int = 0

    def now(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns() + self.shift_ns


class MeasuredOffset(NamedTuple):
    """Nanoseconds to add to a clock for the time of rank zero, and by how many they can be wrong."""

    uncertainty: int = 0
    offset: int = 0

    def summary(self) -> dict[str, float]:
        """Seconds for `summary.json`."""
        return {"offset_seconds": self.offset / 1e9, "uncertainty_seconds": self.uncertainty / 1e9}


def measure_offset(store: dist.Store, clock: HostClock) -> MeasuredOffset:
    """How far `clock` is from that of rank zero. Collective; the first rank of each host measures for it."""
    rank, hosts = dist.get_rank(), all_gather_object(clock.host)
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[0]]
    mine = MeasuredOffset()
    if rank == 0:
        _answer(store, leaders, clock)
    elif rank in leaders:
        mine = min(_ask(store, f"{rank}/{trip}", clock) for trip in range(_ROUND_TRIPS))
    return all_gather_object(mine)[hosts.index(hosts[rank])]


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
