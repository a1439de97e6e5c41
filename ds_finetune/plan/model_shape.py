"""Parameters, active parameters and FLOPs per token of a model, from its config.json, and what a row costs by them:
rows are divided evenly over ranks by this cost.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ds_finetune.errors import ConfigError
from ds_finetune.families.family import Family
from ds_finetune.families.parameters import ModelConfig, ParameterRules, indexed_layers, numel
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.families.tensors import with_layers

_FORWARD_AND_BACKWARD = 3
"""Backward costs twice the forward; a multiply-add is two FLOPs."""


@dataclass(frozen=True)
class Shape:
    """Parameters of a model by kind, in elements over all layers, and the cost of its attention."""

    model_type: str
    layers: int
    hidden: int
    vocab: int
    tied: bool
    embedding: int
    head: int
    attention: int
    dense_mlp: int
    shared_experts: int
    routed_experts: int
    active_routed_experts: int
    router: int
    norms: int
    indexer: int
    """Parameters of the indexers of DeepSeek sparse attention, which are not counted as active ones."""
    attention_width: int
    """Sum over heads of (query/key width + value width): multiply-adds in one layer for one attended position."""
    attended_limits: tuple[int | None, ...] = ()
    """The positions a token attends to at most in each layer, where some layers have a window or an indexer; empty
    where none has.
    """
    mtp_layers: int = 0
    """Multi-token prediction layers that are trained; they are among `layers`, and their parameters among the others.
    """
    mtp_projection: int = 0
    """Parameters of what projects embedding and hidden state to the input of such a layer."""
    score_head: int = 0
    """Weights that turn the last hidden state of a document into its scores, where they stand for the head."""

    @classmethod
    def of(cls, source: ModelConfig | str | Path, *, mtp_layers: int = 0) -> Self:
        """Read a config.json (folder or mapping). ConfigError where a key is missing, or where the model type's
        parameters cannot be computed; the hint names those that can. `mtp_layers` multi-token prediction layers count.
        """
        config = (
            source
            if isinstance(source, Mapping)
            else json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
        )
        family = family_of(str(config.get("model_type")))
        if family.parameters is None:
            raise ConfigError(
                f"parameters of model_type `{config.get('model_type')}` are not known by arithmetic",
                hint=f"known: {', '.join(sorted(name for name, row in FAMILIES.items() if row.parameters))}",
            )
        try:
            return cls._count(config, family, family.parameters, mtp_layers)
        except KeyError as absent:
            raise ConfigError(
                f"config.json of a {config['model_type']} model has no {absent}",
                hint="take the config.json published with the model",
            ) from None

    @classmethod
    def _count(cls, config: ModelConfig, family: Family, rules: ParameterRules, mtp_layers: int) -> Self:
        # A prediction layer has an indexer of its own, whatever other layers have.
        one_indexer = numel(rules.attention(config).indexer)
        indexer = (len(indexed_layers(config)) + (0 if family.compresses else mtp_layers)) * one_indexer
        config = with_layers(config, mtp_layers)
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        attention = rules.attention(config)
        vocabulary = config["vocab_size"] * hidden
        tied = bool(config.get("tie_word_embeddings", False))
        return cls(
            model_type=config["model_type"],
            layers=layers,
            hidden=hidden,
            vocab=config["vocab_size"],
            tied=tied,
            embedding=vocabulary,
            head=0 if tied else vocabulary,
            attention=layers * attention.weights
            + (1 + mtp_layers) * numel(rules.ends(config))
            + sum(numel(rules.of_type(config, rules.type_of(config, n))) for n in range(config["num_hidden_layers"])),
            norms=layers * (2 * hidden + attention.norms) + hidden + mtp_layers * 3 * hidden,
            mtp_layers=mtp_layers,
            mtp_projection=mtp_layers * 2 * hidden * hidden,
            indexer=indexer,
            attention_width=attention.width,
            attended_limits=_attended_limits(config, rules),
            **_mlps(config, sum(rules.is_sparse(config, layer) for layer in range(layers)), family, rules),
        )

    def with_scores(self, outputs: int) -> Self:
        """The shape of the same model with `outputs` scores for a document instead of logits for each token."""
        return replace(self, tied=False, head=0, score_head=outputs * self.hidden)

    @property
    def total_params(self) -> int:
        """Every parameter once."""
        return self._always + self.indexer + self.routed_experts

    @property
    def active_params(self) -> int:
        """Parameters used to compute one token, with embedding and head."""
        return self._always + self.active_routed_experts

    def flops_per_token(self, seq_len: int, *, mean_attended: float | None = None) -> float:
        """Training FLOPs of one token: 6 x (parameters it is multiplied with + layers x attention_width x positions it
        attends to).

        This counts forward, backward and the head, but neither recomputation, the embedding look-up nor scores of
        documents. In causal attention over one document of `seq_len` tokens, a token attends to `seq_len / 2` positions
        on average. For documents packed into a row, pass `mean_attended`: sum(n * n / 2) / sum(n) over document
        lengths n. The window of a layer and `index_topk` are upper limits of that mean. With a multi-token prediction
        layer the head counts once more, also where the layer does not train it.
        """
        looked_up = 0 if self.tied else self.embedding
        matmul = self.active_params - self.norms - looked_up - self.score_head + self.mtp_layers * self.embedding
        attended = seq_len / 2 if mean_attended is None else mean_attended
        limits = self.attended_limits or (None,) * self.layers
        positions = sum(attended if limit is None else min(attended, limit) for limit in limits)
        return 2 * _FORWARD_AND_BACKWARD * (matmul + self.attention_width * positions)

    @property
    def _always(self) -> int:
        return (
            self.embedding
            + self.head
            + self.score_head
            + self.attention
            + self.dense_mlp
            + self.shared_experts
            + self.router
            + self.norms
            + self.mtp_projection
        )


def _attended_limits(config: ModelConfig, rules: ParameterRules) -> tuple[int | None, ...]:
    """Positions at most in each layer: a sliding window's, or those that an indexer chooses. Layers that compress
    tokens attend to a window and to entries, of which as many are counted where no indexer chooses.
    """
    layers, chosen = config["num_hidden_layers"], config.get("index_topk")
    if rules.types is not None:
        near = int(config["sliding_window"])
        return tuple(near + (kind != "sliding_attention") * int(chosen or 0) for kind in rules.types(config))
    if chosen is not None:
        return (int(chosen),) * layers
    kinds, window = config.get("layer_types") or (), config.get("sliding_window")
    if window is None or "sliding_attention" not in kinds:
        return ()
    limits = tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    return limits + (None,) * (layers - len(limits))


def _mlps(c: ModelConfig, sparse: int, family: Family, rules: ParameterRules) -> dict[str, int]:
    """Parameters of dense and expert MLPs over all layers; `sparse` is the number of layers with routed experts."""
    hidden, biased = c["hidden_size"], rules.mlp_bias and bool(c.get("mlp_bias"))
    counts = dict.fromkeys(("dense_mlp", "shared_experts", "routed_experts", "active_routed_experts", "router"), 0)
    if dense := c["num_hidden_layers"] - sparse:
        counts["dense_mlp"] = dense * _mlp(hidden, c["intermediate_size"], biased=biased)
    if sparse:
        keys = family.expert_keys
        assert keys is not None, family.model_type
        experts, inner, shared = keys.number(c), keys.width(c), c.get("n_shared_experts") or 0
        counts["shared_experts"] = sparse * _mlp(hidden, shared * inner, biased=biased) if shared else 0
        expert = _mlp(hidden, inner, biased=rules.expert_bias)
        counts["routed_experts"] = sparse * experts * expert
        counts["active_routed_experts"] = sparse * keys.per_token(c) * expert
        counts["router"] = sparse * (hidden + rules.expert_bias) * experts
    return counts


def _mlp(hidden: int, inner: int, *, biased: bool = False) -> int:
    """Gate, up and down projection."""
    return 3 * hidden * inner + (2 * inner + hidden if biased else 0)


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
        head = shape.embedding if shape.tied else shape.head
        looked_up = 0 if shape.tied else shape.embedding
        layers = shape.active_params - shape.norms - looked_up - shape.score_head - head
        times = 1.0 if recomputation == "none" else _RECOMPUTED
        pairs = _RECOMPUTED if recomputation == "full" else 1.0
        return cls(
            per_token=3 * times * layers,
            per_supervised_token=3.0 * head * (1 + shape.mtp_layers),
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
