"""How many parameters the layers of a model family have, computed from its config.json as transformers 5.23 builds
them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ds_finetune.families.experts import QWEN_EXPERTS

ModelConfig = Mapping[str, Any]
"""The contents of a config.json."""


class AttentionCounts(NamedTuple):
    """Numbers of one layer's attention."""

    weights: int
    """Parameters of its projections, biases included."""
    norms: int
    """Parameters of the norms inside it, and its sinks."""
    width: int
    """Sum over heads of (query/key width + value width): multiply-adds for one attended position."""
    indexer: int = 0
    """Parameters of the indexers of all layers."""


def latent_attention(c: ModelConfig) -> AttentionCounts:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    query_key, value = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"]
    q_rank, kv_rank = c.get("q_lora_rank"), c["kv_lora_rank"]
    query = hidden * q_rank + q_rank * heads * query_key if q_rank else hidden * heads * query_key
    key_value = hidden * (kv_rank + c["qk_rope_head_dim"]) + kv_rank * heads * (c["qk_nope_head_dim"] + value)
    bias = ((q_rank or 0) + kv_rank + c["qk_rope_head_dim"] + hidden) if c.get("attention_bias") else 0
    return AttentionCounts(
        weights=query + key_value + heads * value * hidden + bias,
        norms=(q_rank or 0) + kv_rank,
        width=heads * (query_key + value),
    )


def indexed_latent_attention(c: ModelConfig) -> AttentionCounts:
    """Multi-head latent attention with an indexer in each layer, or in those that `indexer_types` calls `full`
    (transformers 5.23, deepseek_v32/modeling_deepseek_v32.py:154-158).
    """
    heads, width = c["index_n_heads"], c["index_head_dim"]
    one = c["q_lora_rank"] * heads * width + c["hidden_size"] * (width + heads) + 2 * width
    return latent_attention(c)._replace(indexer=one * len(indexed_layers(c)))


def indexed_layers(c: ModelConfig) -> tuple[int, ...]:
    """Numbers of the layers with an indexer (transformers 5.23, glm_moe_dsa/configuration_glm_moe_dsa.py)."""
    types = c.get("indexer_types") or c.get("index_topk_pattern")
    if types is not None:
        return tuple(layer for layer, kind in enumerate(types) if kind in ("full", "F"))
    every, offset = max(c.get("index_topk_freq", 1), 1), c.get("index_skip_topk_offset", 2)
    return tuple(layer for layer in range(c["num_hidden_layers"]) if max(layer - offset + 1, 0) % every == 0)


def grouped_query_attention(
    *,
    qkv_bias: bool = False,
    reads_bias: bool = True,
    output_bias: bool = True,
    norms: Literal["none", "of heads", "over heads"] = "none",
) -> Callable[[ModelConfig], AttentionCounts]:
    """Grouped-query attention. With `qkv_bias` its three input projections always have biases. `attention_bias` of the
    config gives biases to all four projections, without `output_bias` to the first three, without `reads_bias` to none.
    Queries and keys are normalised not at all, each head by itself with one weight for all, or all heads together.
    """

    def count(c: ModelConfig) -> AttentionCounts:
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        width = c.get("head_dim") or hidden // heads
        query, key_value = heads * width, 2 * (c.get("num_key_value_heads") or heads) * width
        is_biased = qkv_bias or (reads_bias and c.get("attention_bias", False))
        bias = query + key_value + (hidden if output_bias and not qkv_bias else 0) if is_biased else 0
        return AttentionCounts(
            weights=hidden * (query + key_value) + query * hidden + bias,
            norms={"none": 0, "of heads": 2 * width, "over heads": query + key_value // 2}[norms],
            width=2 * heads * width,
        )

    return count


def attention_with_sinks(c: ModelConfig) -> AttentionCounts:
    """Grouped-query attention with a sink for each head (gpt_oss)."""
    counts = grouped_query_attention()(c)
    return counts._replace(norms=int(c["num_attention_heads"]))


def glm_attention(c: ModelConfig) -> AttentionCounts:
    """GLM-4.5's grouped-query attention: its output has no bias, and `use_qk_norm` gives norms to queries and keys
    (transformers 5.23, glm4_moe/modeling_glm4_moe.py).
    """
    return grouped_query_attention(norms="of heads" if c.get("use_qk_norm") else "none", output_bias=False)(c)


def never_sparse(_: ModelConfig, __: int) -> bool:
    """No layer has routed experts."""
    return False


def always_sparse(_: ModelConfig, __: int) -> bool:
    """Every layer has routed experts."""
    return True


def sparse_after_first(c: ModelConfig, layer: int) -> bool:
    """Layers from `first_k_dense_replace` on have routed experts.

    transformers 5.23 does not read `moe_layer_freq` (deepseek_v2/modeling_deepseek_v2.py:427), which is 1 in every
    published config.
    """
    return layer >= (c["first_k_dense_replace"] or 0)  # type: ignore[no-any-return]


def sparse_by_type(c: ModelConfig, layer: int) -> bool:
    """Layers that `mlp_layer_types` calls sparse; without the key all but the first.

    transformers 5.23 does not read `first_k_dense_replace` for such models (configuration_glm4_moe_lite.py), which is
    1 in GLM-4.7-Flash.
    """
    types = c.get("mlp_layer_types")
    return types[layer] == "sparse" if types else layer > 0


def sparse_by_type_or_after_first(c: ModelConfig, layer: int) -> bool:
    """Layers that `mlp_layer_types` calls sparse; without the key those from `first_k_dense_replace` on."""
    return sparse_by_type(c, layer) if c.get("mlp_layer_types") else sparse_after_first(c, layer)


def sparse_by_step(c: ModelConfig, layer: int) -> bool:
    """Every `decoder_sparse_step`-th layer has routed experts, except those in `mlp_only_layers`."""
    return (
        layer not in (c.get("mlp_only_layers") or ())
        and QWEN_EXPERTS.number(c) > 0
        and (layer + 1) % c.get("decoder_sparse_step", 1) == 0
    )


@dataclass(frozen=True)
class ParameterRules:
    """How the parameters of a family are counted."""

    attention: Callable[[ModelConfig], AttentionCounts]
    is_sparse: Callable[[ModelConfig, int], bool] = never_sparse
    """Whether layer number i has routed experts instead of a dense MLP."""
    mlp_bias: bool = False
    """Whether `mlp_bias` of the config is read: dense and shared experts have it then, routed experts never."""
    expert_bias: bool = False
    """Whether routed experts and their router have biases."""
