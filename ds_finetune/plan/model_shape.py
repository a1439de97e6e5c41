"""What a model is, from its config.json by arithmetic alone: parameters, active parameters, FLOPs per token."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ds_finetune.errors import ConfigError

_FORWARD_AND_BACKWARD = 3
"""Backward costs twice the forward; a multiply-add is two FLOPs."""


@dataclass(frozen=True)
class Shape:
    """Parameters of a model by kind, and what its attention costs; all numbers are elements, over all layers."""

    model_type: str
    layers: int
    hidden: int
    vocab: int
    max_positions: int
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
    attention_width: int
    """Sum over heads of (query/key width + value width), which is what one attended position costs in multiply-adds."""

    @classmethod
    def of(cls, source: Mapping[str, Any] | str | Path) -> Self:
        """Read a config.json (folder or mapping); ConfigError names the model types whose arithmetic is known, or the
        key that is absent.
        """
        config = (
            source
            if isinstance(source, Mapping)
            else json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
        )
        family = _FAMILIES.get(str(config.get("model_type")))
        if family is None:
            raise ConfigError(
                f"parameters of model_type `{config.get('model_type')}` are not known by arithmetic",
                hint=f"known: {', '.join(sorted(_FAMILIES))}",
            )
        try:
            return cls._counted(config, family)
        except KeyError as absent:
            raise ConfigError(
                f"config.json of a {config['model_type']} model says nothing of {absent}",
                hint="take the config.json published with the model",
            ) from None

    @classmethod
    def _counted(cls, config: Mapping[str, Any], family: "_Family") -> Self:
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        per_layer, norm_extra, width = family.attention(config)
        vocabulary = config["vocab_size"] * hidden
        tied = bool(config.get("tie_word_embeddings", False))
        return cls(
            model_type=config["model_type"],
            layers=layers,
            hidden=hidden,
            vocab=config["vocab_size"],
            max_positions=config.get("max_position_embeddings", 0),
            tied=tied,
            embedding=vocabulary,
            head=0 if tied else vocabulary,
            attention=layers * per_layer,
            norms=layers * (2 * hidden + norm_extra) + hidden,
            attention_width=width,
            **_mlps(config, sum(family.is_sparse(config, layer) for layer in range(layers)), family),
        )

    @property
    def total_params(self) -> int:
        """Every trained parameter once."""
        return self._always + self.routed_experts

    @property
    def active_params(self) -> int:
        """Parameters that one token meets, the embedding and the head included."""
        return self._always + self.active_routed_experts

    def flops_per_token(self, seq_len: int, *, mean_attended: float | None = None) -> float:
        """Training FLOPs of one token: 6 x (parameters it is multiplied with + layers x attention_width x positions it
        attends to).

        Forward and backward, recomputation not counted; no embedding look-up, the head included. Causal attention over
        one
        document of `seq_len` tokens attends to `seq_len / 2` on average; for documents packed into a row give their
        mean as
        `mean_attended`, sum(n * n / 2) / sum(n) over document lengths n.
        """
        matmul = self.active_params - self.norms - self.embedding + (self.embedding if self.tied else 0)
        attended = seq_len / 2 if mean_attended is None else mean_attended
        return 2 * _FORWARD_AND_BACKWARD * (matmul + self.layers * self.attention_width * attended)

    @property
    def _always(self) -> int:
        return (
            self.embedding
            + self.head
            + self.attention
            + self.dense_mlp
            + self.shared_experts
            + self.router
            + self.norms
        )


def _mla(c: Mapping[str, Any]) -> tuple[int, int, int]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): weights, norm weights, width per attended
    position.
    """
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    query_key, value = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"]
    q_rank, kv_rank = c.get("q_lora_rank"), c["kv_lora_rank"]
    query = hidden * q_rank + q_rank * heads * query_key if q_rank else hidden * heads * query_key
    key_value = hidden * (kv_rank + c["qk_rope_head_dim"]) + kv_rank * heads * (c["qk_nope_head_dim"] + value)
    bias = ((q_rank or 0) + kv_rank + c["qk_rope_head_dim"] + hidden) if c.get("attention_bias") else 0
    return query + key_value + heads * value * hidden + bias, (q_rank or 0) + kv_rank, heads * (query_key + value)


def _grouped_query(
    *, qkv_bias: bool = False, head_norms: bool = False
) -> Callable[[Mapping[str, Any]], tuple[int, int, int]]:
    def count(c: Mapping[str, Any]) -> tuple[int, int, int]:
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        width = c.get("head_dim") or hidden // heads
        query, key_value = heads * width, 2 * (c.get("num_key_value_heads") or heads) * width
        biased = qkv_bias or c.get("attention_bias", False)
        bias = query + key_value + (0 if qkv_bias else hidden) if biased else 0
        return hidden * (query + key_value) + query * hidden + bias, 2 * width if head_norms else 0, 2 * heads * width

    return count


def _never_sparse(_: Mapping[str, Any], __: int) -> bool:
    return False


def _sparse_after_first(c: Mapping[str, Any], layer: int) -> bool:
    """transformers 5.23 does not read `moe_layer_freq` (deepseek_v2/modeling_deepseek_v2.py:427), which is 1 in every
    published config.
    """
    return layer >= (c["first_k_dense_replace"] or 0)


def _sparse_by_step(c: Mapping[str, Any], layer: int) -> bool:
    return (
        layer not in (c.get("mlp_only_layers") or ())
        and _experts(c) > 0
        and (layer + 1) % c.get("decoder_sparse_step", 1) == 0
    )


def _experts(c: Mapping[str, Any]) -> int:
    """DeepSeek's name, Qwen's, or the one transformers 5.23 writes for Qwen's; KeyError where none is given."""
    return int(
        c[next((name for name in ("n_routed_experts", "num_experts", "num_local_experts") if name in c), "num_experts")]
    )


@dataclass(frozen=True)
class _Family:
    """What differs between model types, as transformers 5.23 builds them."""

    attention: Callable[[Mapping[str, Any]], tuple[int, int, int]]
    is_sparse: Callable[[Mapping[str, Any], int], bool] = _never_sparse
    mlp_bias: bool = False
    """Whether `mlp_bias` of the config is read: dense and shared experts have it then, routed experts never."""


_FAMILIES: Mapping[str, _Family] = {
    "deepseek_v2": _Family(_mla, _sparse_after_first, mlp_bias=True),
    "deepseek_v3": _Family(_mla, _sparse_after_first),
    "llama": _Family(_grouped_query(), mlp_bias=True),
    "qwen2": _Family(_grouped_query(qkv_bias=True)),
    "qwen3": _Family(_grouped_query(head_norms=True)),
    "qwen3_moe": _Family(_grouped_query(head_norms=True), _sparse_by_step),
}


def _mlps(c: Mapping[str, Any], sparse: int, family: _Family) -> dict[str, int]:
    """Dense and expert MLPs over all layers, `sparse` of which hold experts."""
    hidden, biased = c["hidden_size"], family.mlp_bias and bool(c.get("mlp_bias"))
    counts = dict.fromkeys(("shared_experts", "routed_experts", "active_routed_experts", "router"), 0)
    counts["dense_mlp"] = (c["num_hidden_layers"] - sparse) * _mlp(hidden, c["intermediate_size"], biased=biased)
    if sparse:
        experts = _experts(c)
        inner, shared = c["moe_intermediate_size"], c.get("n_shared_experts") or 0
        counts["shared_experts"] = sparse * _mlp(hidden, shared * inner, biased=biased) if shared else 0
        counts["routed_experts"] = sparse * experts * _mlp(hidden, inner)
        counts["active_routed_experts"] = sparse * c["num_experts_per_tok"] * _mlp(hidden, inner)
        counts["router"] = sparse * hidden * experts
    return counts


def _mlp(hidden: int, inner: int, *, biased: bool = False) -> int:
    """Gate, up and down projection."""
    return 3 * hidden * inner + (2 * inner + hidden if biased else 0)
