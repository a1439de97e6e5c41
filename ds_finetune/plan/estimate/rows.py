"""Rows of a memory estimate. A row says how many bytes of which memory (GPU, host, ...) a rank holds for something, at
which moments of a step, and which run-file option reduces them.
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
"""Moments of an optimizer step in which a micro-batch is computed."""
KEPT_FOR_BACKWARD: tuple[Moment, ...] = (*FORWARD, "head backward", "layers")
"""Moments of a step in which layers hold activations for their backward."""


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
    """Maximum, over the moments of a step, of the bytes that all rows together hold in the memory `place`."""
    return held(rows, place, fullest_moment(rows, place))


def fullest_moment(rows: Sequence[MemoryRow], place: Place) -> Moment:
    """The moment of a step in which the rows hold most bytes in the memory `place`."""
    return max(MOMENTS, key=lambda moment: held(rows, place, moment))


def held(rows: Sequence[MemoryRow], place: Place, moment: Moment) -> int:
    """Bytes that the rows hold in the memory `place` at a moment of a step."""
    return sum(row.num_bytes for row in rows if row.place == place and moment in row.when)
