"""The rows of an estimate of memory: what is held where, when, and which option of the run file lowers it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Place = Literal["gpu", "host", "nvme", "disk"]
Moment = Literal[
    "teacher", "forward", "head", "head backward", "layers", "embedding", "reduction", "step", "exchange", "rollout"
]
"""Moments of an optimizer step: the forward of a teacher, that of the model's layers, the head and the loss, their
backward, that of layers, the gradient of the embedding, the reduction of gradients after backward, the optimizer's
update, and the exchange of updated weights; and the sampling of answers between steps.
"""
MOMENTS: tuple[Moment, ...] = get_args(Moment)
FORWARD: tuple[Moment, ...] = ("forward", "head")
BACKWARD: tuple[Moment, ...] = ("head backward", "layers", "embedding")
MICRO_BATCH: tuple[Moment, ...] = ("teacher", *FORWARD, *BACKWARD)
"""While a micro-batch is computed."""
KEPT_FOR_BACKWARD: tuple[Moment, ...] = (*FORWARD, "head backward", "layers")
"""While what layers keep for their backward is there."""


@dataclass(frozen=True)
class MemoryRow:
    """One part of the memory of a rank."""

    name: str
    place: Place
    num_bytes: int
    option: str = ""
    """The option of the run file that lowers it; empty where there is none."""
    when: tuple[Moment, ...] = MOMENTS


def peak(rows: Sequence[MemoryRow], place: Place) -> int:
    """Bytes in a place at the moment when most is held there; rows of other moments are not added."""
    return held(rows, place, fullest_moment(rows, place))


def fullest_moment(rows: Sequence[MemoryRow], place: Place) -> Moment:
    """The moment when most is held in a place."""
    return max(MOMENTS, key=lambda moment: held(rows, place, moment))


def held(rows: Sequence[MemoryRow], place: Place, moment: Moment) -> int:
    """Bytes in a place at a moment."""
    return sum(row.num_bytes for row in rows if row.place == place and moment in row.when)
