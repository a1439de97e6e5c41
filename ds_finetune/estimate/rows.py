"""The rows of an estimate of memory: what is held where, when, and which option of the run file lowers it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Place = Literal["gpu", "host", "nvme", "disk"]
Moment = Literal["always", "head", "layers", "step"]
"""When something is held: all the time; while the head and the loss are computed; while layers are computed; or in the
optimizer's step. The last three exclude each other.
"""
MOMENTS: tuple[Moment, ...] = ("head", "layers", "step")


@dataclass(frozen=True)
class MemoryRow:
    """One part of the memory of a rank."""

    name: str
    place: Place
    num_bytes: int
    option: str = ""
    """The option of the run file that lowers it; empty where there is none."""
    when: Moment = "always"


def peak(rows: Sequence[MemoryRow], place: Place) -> int:
    """Bytes in a place at most: what is always held, and the most that is held beside it at one moment."""
    return held(rows, place, "always") + max(held(rows, place, moment) for moment in MOMENTS)


def held(rows: Sequence[MemoryRow], place: Place, when: Moment) -> int:
    """Bytes in a place at a moment, without those that are always held."""
    return sum(row.num_bytes for row in rows if row.place == place and row.when == when)
