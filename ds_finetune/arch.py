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
        """Read a config.json (folder or mapping); ConfigError names the model types whose arithmetic is known."""
        config = source if isinstance(source, Mapping) else json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
        model_type = config.get("model_type")
        attention = _ATTENTION.get(str(model_type))
        if attention is None:
            raise ConfigError(f"parameters of model_type `{model_type}` are not known by arithmetic", hint=f"known: {', '.join(sorted(_ATTENTION))}")
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        per_layer, norm_extra, width = attention(config)
        moe = _moe(config, layers, hidden)
        vocabulary = config["vocab_size"] * hidden
        tied = bool(config.get("tie_word_embeddings", False))
        return cls(
            model_type=str(model_type),
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
            **moe,
        )

    @property
    def total_params(self) -> int:
        """Every trained parameter once."""
        return self._always + self.routed_experts

    @property
    def active_params(self) -> int:
        """Parameters that one token meets, the embedding and the head included."""
        return self._always + self.active_routed_experts

    def flops_per_token(self, seq_len: int) -> float:
        """Training FLOPs of one token: 6 x parameters it is multiplied with (no embedding look-up, the head included)
        + causal attention over `seq_len / 2` positions on average, forward and backward, recomputation not counted."""
        matmul = self.active_params - self.norms - self.embedding + (self.embedding if self.tied else 0)
        attended = seq_len / 2
        return 2 * _FORWARD_AND_BACKWARD * (matmul + self.layers * self.attention_width * attended)

    @property
    def _always(self) -> int:
        return self.embedding + self.head + self.attention + self.dense_mlp + self.shared_experts + self.router + self.norms


def _mla(c: Mapping[str, Any]) -> tuple[int, int, int]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): weights, norm weights, width per attended position."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    query_key, value = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"]
    q_rank, kv_rank = c.get("q_lora_rank"), c["kv_lora_rank"]
    query = hidden * q_rank + q_rank * heads * query_key if q_rank else hidden * heads * query_key
    key_value = hidden * (kv_rank + c["qk_rope_head_dim"]) + kv_rank * heads * (c["qk_nope_head_dim"] + value)
    bias = ((q_rank or 0) + kv_rank + c["qk_rope_head_dim"] + hidden) if c.get("attention_bias") else 0
    return query + key_value + heads * value * hidden + bias, (q_rank or 0) + kv_rank, heads * (query_key + value)


def _grouped_query(*, qkv_bias: bool = False, head_norms: bool = False) -> Callable[[Mapping[str, Any]], tuple[int, int, int]]:
    def count(c: Mapping[str, Any]) -> tuple[int, int, int]:
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        width = c.get("head_dim") or hidden // heads
        query, key_value = heads * width, 2 * (c.get("num_key_value_heads") or heads) * width
        biased = qkv_bias or c.get("attention_bias", False)
        bias = query + key_value + (0 if qkv_bias else hidden) if biased else 0
        return hidden * (query + key_value) + query * hidden + bias, 2 * width if head_norms else 0, 2 * heads * width

    return count


_ATTENTION: Mapping[str, Callable[[Mapping[str, Any]], tuple[int, int, int]]] = {
    "deepseek_v2": _mla,
    "deepseek_v3": _mla,
    "llama": _grouped_query(),
    "qwen2": _grouped_query(qkv_bias=True),
    "qwen3": _grouped_query(head_norms=True),
    "qwen3_moe": _grouped_query(head_norms=True),
}


def _moe(c: Mapping[str, Any], layers: int, hidden: int) -> dict[str, int]:
    """Dense and expert MLPs over all layers; every projection triple is 3 x hidden x inner."""
    experts = c.get("n_routed_experts") or c.get("num_experts") or c.get("num_local_experts") or 0
    sparse = sum(_is_sparse(c, layer) for layer in range(layers)) if experts else 0
    inner = 3 * hidden * (c.get("moe_intermediate_size") or 0)
    return {
        "dense_mlp": (layers - sparse) * 3 * hidden * c["intermediate_size"],
        "shared_experts": sparse * inner * (c.get("n_shared_experts") or 0),
        "routed_experts": sparse * inner * experts,
        "active_routed_experts": sparse * inner * (c.get("num_experts_per_tok") or 0),
        "router": sparse * hidden * experts,
    }


def _is_sparse(c: Mapping[str, Any], layer: int) -> bool:
    if layer < c.get("first_k_dense_replace", 0) or layer in c.get("mlp_only_layers", ()):
        return False
    step = c.get("moe_layer_freq") or c.get("decoder_sparse_step") or 1
    return layer % step == 0 if "moe_layer_freq" in c else (layer + 1) % step == 0
