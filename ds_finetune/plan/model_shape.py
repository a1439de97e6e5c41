"""Parameters, active parameters and FLOPs per token of a model, and what a row costs by them: rows are divided evenly
over ranks by this cost.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ds_finetune.families.layer_rules import compressed_types
from ds_finetune.families.table import family_of
from ds_finetune.plan.forward import head_widths
from ds_finetune.plan.model_tensors import DescribedModel, part_of

_FORWARD_AND_BACKWARD = 3
"""Backward costs twice the forward; a multiply-add is two FLOPs."""


def is_known(model: DescribedModel) -> bool:
    """Whether a model is of a family that is no encoder, and the part that each of its tensors belongs to is known."""
    family = family_of(str(model.get("model_type")))
    return not family.is_generic and family.encoder is None and all(map(part_of, model.tensors.by_name))


@dataclass(frozen=True)
class Shape:
    """Parameters of a model by part, in elements over all layers, and the cost of its attention."""

    parts: Mapping[str, int]
    """Elements by the names of `part_of`; those of indexers are not counted as active ones."""
    active_routed_experts: int
    layers: int
    """Number of layers, with multi-token prediction layers that are trained."""
    mtp_layers: int
    tied: bool
    has_scores: bool
    """Whether the head gives scores of a document instead of logits of each token."""
    attention_width: int
    """Sum over heads of (query/key width + value width): multiply-adds in one layer for one attended position."""
    attended_limits: tuple[int | None, ...] = ()
    """The positions a token attends to at most in each layer, where some layers have a window or an indexer; empty
    where none has.
    """

    @classmethod
    def of(cls, model: DescribedModel) -> Self:
        """The shape of a model that `is_known`."""
        assert is_known(model)
        tensors, parts = model.tensors, Counter[str]()
        for name, tensor in tensors.by_name.items():
            parts[part_of(name)] += tensor.numel
        keys = family_of(str(model["model_type"])).expert_keys
        routed = parts["routed experts"]
        return cls(
            parts=parts,
            active_routed_experts=routed * keys.per_token(model) // keys.number(model) if keys and routed else 0,
            layers=len(tensors.layers),
            mtp_layers=tensors.num_predictions,
            tied=tensors.is_tied,
            has_scores=any(name.startswith("score.") for name in tensors.ends),
            attention_width=model["num_attention_heads"] * sum(head_widths(model)),
            attended_limits=_attended_limits(model),
        )

    @property
    def total_params(self) -> int:
        """Every parameter once."""
        return sum(self.parts.values())

    @property
    def active_params(self) -> int:
        """Parameters used to compute one token, with embedding and head."""
        return self.total_params - self.parts["indexer"] - self.parts["routed experts"] + self.active_routed_experts

    @property
    def multiplied(self) -> int:
        """Parameters of layers that each token is multiplied with."""
        return self.active_params - sum(self.parts[part] for part in ("norms", "embedding", "head"))

    @property
    def logits(self) -> int:
        """Parameters that a token is multiplied with to give logits; 0 of scores, which only one token of a document
        gives.
        """
        return 0 if self.has_scores else self.parts["embedding" if self.tied else "head"]

    def flops_per_token(self, seq_len: int, *, mean_attended: float | None = None, has_adapters: bool = False) -> float:
        """Training FLOPs of one token: 6 x (parameters it is multiplied with + layers x attention_width x positions it
        attends to).

        This counts forward, backward and the head, but neither recomputation, the embedding look-up nor scores of
        documents. In causal attention over one document of `seq_len` tokens, a token attends to `seq_len / 2` positions
        on average. For documents packed into a row, pass `mean_attended`: sum(n * n / 2) / sum(n) over document
        lengths n. The window of a layer and `index_topk` are upper limits of that mean. With a multi-token prediction
        layer the head counts once more, also where the layer does not train it. With adapters the gradients of frozen
        weights are not computed: 4 x these parameters.
        """
        matmul = self.multiplied + self.logits * (1 + self.mtp_layers)
        attended = seq_len / 2 if mean_attended is None else mean_attended
        limits = self.attended_limits or (None,) * self.layers
        positions = sum(attended if limit is None else min(attended, limit) for limit in limits)
        products = 2 * (_FORWARD_AND_BACKWARD - has_adapters) * matmul
        return products + 2 * _FORWARD_AND_BACKWARD * self.attention_width * positions


def _attended_limits(model: DescribedModel) -> tuple[int | None, ...]:
    """Positions at most in each layer: a sliding window's, or those that an indexer chooses. Layers that compress
    tokens attend to a window and to entries, of which as many are counted where no indexer chooses.
    """
    layers, chosen, window = len(model.tensors.layers), model.get("index_topk"), model.get("sliding_window")
    if family_of(str(model["model_type"])).compresses:
        near = int(model["sliding_window"])
        found = tuple(near + (kind != "sliding_attention") * int(chosen or 0) for kind in compressed_types(model))
        return found + (near,) * (layers - len(found))
    if chosen is not None:
        return (int(chosen),) * layers
    kinds = model.get("layer_types") or ()
    if window is None or "sliding_attention" not in kinds:
        return ()
    # A prediction layer is like the last layer.
    return tuple(int(window) if kinds[min(n, len(kinds) - 1)] == "sliding_attention" else None for n in range(layers))


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
    def of(cls, shape: Shape | None, recomputation: str) -> Self:
        """The cost of rows of a model; for one whose shape is not known, a row costs its tokens."""
        if shape is None:
            return cls(per_token=1.0, per_supervised_token=0.0, per_pair=0.0, limits=())
        times = 1.0 if recomputation == "none" else _RECOMPUTED
        pairs = _RECOMPUTED if recomputation == "full" else 1.0
        return cls(
            per_token=3 * times * shape.multiplied,
            per_supervised_token=3.0 * shape.logits * (1 + shape.mtp_layers),
            per_pair=3 * pairs * shape.attention_width,
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
