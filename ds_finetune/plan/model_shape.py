"""Number of parameters of a model, and the cost of a row. This cost balances rows over data parallel ranks."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ds_finetune.families.layer_rules import compressed_types
from ds_finetune.plan.forward import head_widths
from ds_finetune.plan.model_tensors import SCORE_HEAD, DescribedModel, part_of


def has_known_shape(model: DescribedModel) -> bool:
    """Whether the model is a decoder from the table of families, all its layers have equal heads, and all its tensors
    belong to known parts.
    """
    family = model.family
    is_decoder = not family.is_generic and family.encoder is None and not model.get("per_layer_config")
    return is_decoder and all(map(part_of, model.tensors.by_name))


@dataclass(frozen=True)
class Shape:
    """Parameters of a model by part, in elements over all layers."""

    parts: Mapping[str, int]
    """Number of elements of each part of the model, by the names that `part_of` gives."""
    active_routed_experts: int

    @classmethod
    def of(cls, model: DescribedModel) -> Self:
        """Shape of a model; `has_known_shape` must hold for the model."""
        assert has_known_shape(model)
        parts = Counter[str]()
        for name, tensor in model.tensors.by_name.items():
            parts[part_of(name)] += tensor.numel
        keys, routed = model.family.expert_keys, parts["routed experts"]
        return cls(parts, routed * keys.per_token(model) // keys.number(model) if keys and routed else 0)

    @property
    def total_params(self) -> int:
        """Total parameters."""
        return sum(self.parts.values())

    @property
    def active_params(self) -> int:
        """Parameters used for one token, including embedding and head."""
        return self.total_params - self.parts["indexer"] - self.parts["routed experts"] + self.active_routed_experts

    @property
    def multiplied(self) -> int:
        """Parameters in matrix products of one token in all layers: `active_params` less norms, embedding and head."""
        return self.active_params - sum(self.parts[part] for part in ("norms", "embedding", "head"))


def _attended_limits(model: DescribedModel) -> tuple[int | None, ...]:
    """Maximum number of positions that a token attends to in each layer: its sliding window, or the number of tokens
    that its indexer chooses; None for no limit. A layer that compresses tokens may attend to the tokens of a window and
    to as many compressed entries as its indexer chooses.
    """
    layers, chosen, window = len(model.tensors.layers), model.get("index_topk"), model.get("sliding_window")
    if model.family.compresses:
        near = int(model["sliding_window"])
        limits = tuple(near + (kind != "sliding_attention") * int(chosen or 0) for kind in compressed_types(model))
        return limits + (near,) * (layers - len(limits))
    if chosen is not None:
        return (int(chosen),) * layers
    kinds = model.get("layer_types") or ()
    if window is None or "sliding_attention" not in kinds:
        return (None,) * layers
    # A multi-token prediction layer has the same kind of attention as the last layer.
    return tuple(int(window) if kinds[min(n, len(kinds) - 1)] == "sliding_attention" else None for n in range(layers))


def parameters_text(model: DescribedModel) -> str:
    """Text of a plan line: number of parameters of a model and, for a known shape, of parameters used per token."""
    number = model.tensors.numel
    unit, name = (1e9, "B") if number >= 1e9 else (1e6, "M")
    text = f"{number / unit:,.3f} {name}"
    if not has_known_shape(model):
        return text
    return f"{text}, {Shape.of(model).active_params / unit:,.3f} {name} active per token"


_RECOMPUTED = 4 / 3
"""Cost of a layer with recomputation relative to one without: a backward costs two forwards, and recomputation adds
one.
"""


@dataclass(frozen=True)
class RowCost:
    """Multiply-adds of forward and backward: of layers for each token, of the head for each supervised token
    (`model/loss/cross_entropy.py`), and of attention for each pair of tokens that attention computes.
    """

    per_token: float
    per_supervised_token: float
    per_pair: float
    """Multiply-adds of attention in one layer, for each pair of tokens that attention computes."""
    limits: tuple[int | None, ...]
    """Maximum positions that a token attends to, for each layer."""

    @classmethod
    def of(cls, model: DescribedModel, recomputation: str) -> Self:
        """Cost of rows of a model; if its shape is not known, the cost of a row is its number of tokens."""
        if not has_known_shape(model):
            return cls(per_token=1.0, per_supervised_token=0.0, per_pair=0.0, limits=())
        shape, tensors = Shape.of(model), model.tensors
        times = 1.0 if recomputation == "none" else _RECOMPUTED
        pairs = _RECOMPUTED if recomputation == "full" else 1.0
        # Only one token per document uses a score head.
        head = 0 if SCORE_HEAD in tensors.ends else shape.parts["embedding" if tensors.is_tied else "head"]
        return cls(
            per_token=3 * times * shape.multiplied,
            per_supervised_token=3.0 * head * (1 + tensors.num_predictions),
            per_pair=3 * pairs * model["num_attention_heads"] * sum(head_widths(model)),
            limits=_attended_limits(model),
        )

    def of_row(self, lengths: NDArray[np.int64], supervised: int, *, row_len: int | None) -> float:
        """Cost of a row of documents with these lengths, which is padded to `row_len`.

        Padding to `row_len` counts as a document. Padding of unpacked rows (`row_len` None) does not count.
        """
        padding = 0 if row_len is None else row_len - int(lengths.sum())
        padded = np.append(lengths, padding).astype(np.float64)
        pairs = sum(float(attended_pairs(padded, limit).sum()) * count for limit, count in Counter(self.limits).items())
        return self.per_token * float(padded.sum()) + self.per_supervised_token * supervised + self.per_pair * pairs


def attended_pairs(lengths: NDArray[np.float64], limit: int | None) -> NDArray[np.float64]:
    """Number of pairs of tokens of which one attends to the other, for each document, under causal attention. A token
    attends to at most `limit` positions.
    """
    if limit is None:
        return lengths**2 / 2
    near = np.minimum(lengths, limit)
    return near**2 / 2 + (lengths - near) * limit
