"""Rows of a memory estimate: bytes with their memory, the moments of a step in which they are held, and the option of
the run file that lowers them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Place = Literal["gpu", "host", "nvme", "disk"]
Moment = Literal[
    "teacher", "forward", "head", "head backward", "layers", "embedding", "reduction", "step", "exchange", "rollout"
]
"""Moments of an optimizer step: forward of a teacher; forward of the model's layers; head and loss; their backward;
backward of the layers; gradient of the embedding; reduction of gradients; optimizer update; exchange of updated
weights. `rollout` is the sampling of answers between steps.
"""
MOMENTS: tuple[Moment, ...] = get_args(Moment)
FORWARD: tuple[Moment, ...] = ("forward", "head")
BACKWARD: tuple[Moment, ...] = ("head backward", "layers", "embedding")
MICRO_BATCH: tuple[Moment, ...] = ("teacher", *FORWARD, *BACKWARD)
"""Moments in which a micro-batch is computed."""
KEPT_FOR_BACKWARD: tuple[Moment, ...] = (*FORWARD, "head backward", "layers")
"""Moments in which activations that layers keep for backward are held."""


@dataclass(frozen=True)
class MemoryRow:
    """A part of the memory of a rank, such as its gradients."""

    name: str
    place: Place
    num_bytes: int
    option: str = ""
    """The option of the run file that lowers this memory; empty without one."""
    when: tuple[Moment, ...] = MOMENTS


def peak(rows: Sequence[MemoryRow], place: Place) -> int:
    """Peak bytes in a place, over the moments of a step."""
    return held(rows, place, fullest_moment(rows, place))


def fullest_moment(rows: Sequence[MemoryRow], place: Place) -> Moment:
    """The moment in which most bytes are held in a place."""
    return max(MOMENTS, key=lambda moment: held(rows, place, moment))


def held(rows: Sequence[MemoryRow], place: Place, moment: Moment) -> int:
    """Bytes in a place at a moment."""
    return sum(row.num_bytes for row in rows if row.place == place and moment in row.when)
