"""What a row costs to train on, in FLOPs: by this, rows are divided evenly over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ds_finetune.plan.model_shape import Shape

_RECOMPUTED = 4 / 3
"""With activation checkpointing a layer's forward runs twice, and its backward costs two forwards."""


@dataclass(frozen=True)
class RowCost:
    """Multiply-adds of forward and backward: of layers for each token, of the head for each supervised token, and of
    attention for each pair of tokens of which one attends to the other.

    The head takes only supervised positions (`model/loss/cross_entropy.py`).
    """

    per_token: float
    per_supervised_token: float
    per_pair: float
    """In one layer."""
    limits: tuple[int | None, ...]
    """The positions a token attends to at most, for each layer."""

    @classmethod
    def of(cls, shape: Shape | None, *, recomputes: bool) -> Self:
        """The cost of rows of a model; for one whose shape is not known, a row costs its tokens."""
        if shape is None:
            return cls(per_token=1.0, per_supervised_token=0.0, per_pair=0.0, limits=())
        head = shape.embedding if shape.tied else shape.head
        looked_up = 0 if shape.tied else shape.embedding
        layers = shape.active_params - shape.norms - looked_up - shape.score_head - head
        times = _RECOMPUTED if recomputes else 1.0
        return cls(
            per_token=3 * times * layers,
            per_supervised_token=3.0 * head * (1 + shape.mtp_layers),
            per_pair=3 * times * shape.attention_width,
            limits=shape.attended_limits or (None,) * shape.layers,
        )

    def of_row(self, lengths: NDArray[np.int64], supervised: int, *, row_len: int | None) -> float:
        """Cost of a row of documents with these lengths, which is padded to `row_len`.

        Padding to `row_len` is computed as a document of its own. That of unpacked rows (None) is not counted.
        """
        padding = 0 if row_len is None else row_len - int(lengths.sum())
        padded = np.append(lengths, padding).astype(np.float64)
        pairs = sum(float(_pairs(padded, limit).sum()) * count for limit, count in _counted(self.limits))
        return self.per_token * float(padded.sum()) + self.per_supervised_token * supervised + self.per_pair * pairs


def _counted(limits: Sequence[int | None]) -> list[tuple[int | None, int]]:
    return [(limit, limits.count(limit)) for limit in dict.fromkeys(limits)]


def _pairs(lengths: NDArray[np.float64], limit: int | None) -> NDArray[np.float64]:
    """Pairs of tokens in documents with causal attention, where a token attends to `limit` positions at most."""
    if limit is None:
        return lengths**2 / 2
    near = np.minimum(lengths, limit)
    return near**2 / 2 + (lengths - near) * limit
