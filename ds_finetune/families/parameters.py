"""The parameters of a model family's attention, and which of its layers have experts, from its config.json as
transformers 5.23 builds them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple

ModelConfig = Mapping[str, Any]
"""The contents of a config.json."""


Shape = tuple[int, ...]
Tensors = Mapping[str, Shape]
"""Shapes of parameters by their names within a module; a matrix is [outputs, inputs]."""


@dataclass(frozen=True)
class AttentionTensors:
    """One layer's attention."""

    projections: Tensors
    """Its projections, biases included."""
    inner_norms: Tensors
    """The norms inside it, and its sinks."""
    width: int
    """Sum over heads of (query/key width + value width): multiply-adds for one attended position."""
    indexer: Tensors = field(default_factory=dict)
    """Its indexer, which not every layer has."""

    @property
    def weights(self) -> int:
        """Parameters of its projections."""
        return numel(self.projections)

    @property
    def norms(self) -> int:
        """Parameters of the norms inside it, and its sinks."""
        return numel(self.inner_norms)


def numel(tensors: Tensors) -> int:
    """Elements of all these tensors."""
    return sum(map(prod, tensors.values()))


def latent_attention(c: ModelConfig) -> AttentionTensors:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    query_key, value = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"]
    q_rank, kv_rank = c.get("q_lora_rank"), c["kv_lora_rank"]
    latent, key_value = kv_rank + c["qk_rope_head_dim"], heads * (c["qk_nope_head_dim"] + value)
    biased = bool(c.get("attention_bias"))
    if q_rank:
        query = {**_linear("q_a_proj", q_rank, hidden, biased=biased), **_linear("q_b_proj", heads * query_key, q_rank)}
    else:
        query = _linear("q_proj", heads * query_key, hidden)
    return AttentionTensors(
        projections={
            **query,
            **_linear("kv_a_proj_with_mqa", latent, hidden, biased=biased),
            **_linear("kv_b_proj", key_value, kv_rank),
            **_linear("o_proj", hidden, heads * value, biased=biased),
        },
        inner_norms={**({"q_a_layernorm.weight": (q_rank,)} if q_rank else {}), "kv_a_layernorm.weight": (kv_rank,)},
        width=heads * (query_key + value),
    )


def indexed_latent_attention(c: ModelConfig) -> AttentionTensors:
    """Multi-head latent attention with an indexer in each layer, or in those that `indexer_types` calls `full`
    (transformers 5.23, deepseek_v32/modeling_deepseek_v32.py:154-158).
    """
    heads, width = c["index_n_heads"], c["index_head_dim"]
    indexer = {
        **_linear("indexer.wq_b", heads * width, c["q_lora_rank"]),
        **_linear("indexer.wk", width, c["hidden_size"]),
        "indexer.k_norm.weight": (width,),
        "indexer.k_norm.bias": (width,),
        **_linear("indexer.weights_proj", heads, c["hidden_size"]),
    }
    return replace(latent_attention(c), indexer=indexer)


_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
RATES: Mapping[str, int] = {_SPARSE: 4, _HEAVY: 128}
"""Tokens of an entry by kind of attention, unless `compress_rates` says others."""
OLDER_RATES: Mapping[str, str] = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
"""Keys that transformers reads in place of `compress_rates`."""
RATIOS: Mapping[int, str] = {0: "sliding_attention", 4: _SPARSE, 128: _HEAVY}
"""Kinds of attention of DeepSeek-V4 by the published `compress_ratios`; 0 where nothing is compressed."""


def compressed_attention(c: ModelConfig) -> AttentionTensors:
    """What attention of DeepSeek-V4 has in every layer, and its indexer (transformers 5.23,
    deepseek_v4/modeling_deepseek_v4.py:775-800).
    """
    hidden, heads, width, rank = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["q_lora_rank"]
    index_heads, groups, index = c["index_n_heads"], c["o_groups"], "compressor.indexer"
    return AttentionTensors(
        projections={
            **_linear("q_a_proj", rank, hidden),
            **_linear("q_b_proj", heads * width, rank),
            **_linear("kv_proj", width, hidden),
            **_linear("o_a_proj", groups * c["o_lora_rank"], heads * width // groups),
            **_linear("o_b_proj", hidden, groups * c["o_lora_rank"]),
        },
        inner_norms={"q_a_norm.weight": (rank,), "kv_norm.weight": (width,), "sinks": (heads,)},
        width=2 * heads * width,
        indexer={
            **_compressor(index, hidden, c["index_head_dim"], _rate(c, _SPARSE), series=2),
            **_linear(f"{index}.q_b_proj", index_heads * c["index_head_dim"], rank),
            **_linear(f"{index}.scorer.weights_proj", index_heads, hidden),
        },
    )


def compressed_layer(c: ModelConfig, kind: str) -> Tensors:
    """What a layer of DeepSeek-V4 whose attention is of `kind` has beside what all have: a compressor, and hyper-
    connections, whose streams are `hc_mult`.
    """
    hidden, streams = c["hidden_size"], c.get("hc_mult", 4)
    found: dict[str, Shape] = {}
    for module in ("attn_hc", "ffn_hc"):
        found[f"{module}.fn"] = ((2 + streams) * streams, streams * hidden)
        found |= {f"{module}.base": ((2 + streams) * streams,), f"{module}.scale": (3,)}
    if kind in RATES:
        series = 2 if kind == _SPARSE else 1
        found |= _compressor("self_attn.compressor", hidden, c["head_dim"], _rate(c, kind), series=series)
    return found


def hyper_head(c: ModelConfig) -> Tensors:
    """What DeepSeek-V4 has after its layers: the weights that make one stream of all."""
    streams = c.get("hc_mult", 4)
    head = {"hc_fn": (streams, streams * c["hidden_size"]), "hc_base": (streams,), "hc_scale": (1,)}
    return {f"model.hc_head.{name}": shape for name, shape in head.items()}


def compressed_types(c: ModelConfig) -> tuple[str, ...]:
    """The kind of attention of each layer of DeepSeek-V4: `layer_types`, or as it is published `compress_ratios`.
    KeyError where a ratio is not known.
    """
    kinds = c.get("layer_types") or [RATIOS[ratio] for ratio in c["compress_ratios"]]
    return tuple(kinds[: c["num_hidden_layers"]])


def longest_window(c: ModelConfig) -> int:
    """Tokens of the longest window that a layer of DeepSeek-V4 compresses into an entry; 0 where none does."""
    return max((_rate(c, kind) for kind in compressed_types(c) if kind in RATES), default=0)


def hashed_layers(c: ModelConfig) -> tuple[int, ...]:
    """Numbers of the layers of DeepSeek-V4 whose routers choose experts by the ids of tokens."""
    kinds = c.get("mlp_layer_types") or ["hash_moe"] * c.get("num_hash_layers", 0)
    return tuple(layer for layer, kind in enumerate(kinds[: c["num_hidden_layers"]]) if kind == "hash_moe")


class Window(NamedTuple):
    """The windows whose tokens a layer of DeepSeek-V4 compresses into entries."""

    tokens: int
    series: int
    """2 where an entry also holds the tokens of the window before."""
    has_indexer: bool


def window_of(c: ModelConfig, kind: str) -> Window | None:
    """The windows of a layer with this kind of attention; None where it has none."""
    is_sparse = kind == _SPARSE
    return Window(_rate(c, kind), 1 + is_sparse, is_sparse) if kind in RATES else None


def entry_tokens(c: ModelConfig) -> int:
    """Tokens of the windows of the entries that an indexer of DeepSeek-V4 chooses from."""
    return _rate(c, _SPARSE)


def published_layers(c: ModelConfig) -> dict[str, Any]:
    """The keys by which DeepSeek-V4 is published in place of those of transformers 5.23 in `c`, where these are there:
    kinds of layers as numbers, hash routers, and the scaling of the rotary embedding of layers that compress.
    """
    kinds, rope = c.get("layer_types"), c.get("rope_parameters") or {}
    found: dict[str, Any] = {}
    if kinds and all(_rate(c, kind) == rate for kind, rate in RATES.items()):
        numbers = {kind: ratio for ratio, kind in RATIOS.items()}
        found["compress_ratios"] = [numbers[kind] for kind in kinds]
    if c.get("mlp_layer_types"):
        found["num_hash_layers"] = list(c["mlp_layer_types"]).count("hash_moe")
    if scaling := rope.get("compress"):
        kept = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate")
        kind = scaling.get("rope_type", "default")
        scaled = {"type": kind, **{key: scaling[key] for key in kept if key in scaling}}
        found["rope_scaling"] = None if kind == "default" else scaled
    return found


def _compressor(name: str, hidden: int, width: int, rate: int, *, series: int) -> dict[str, Shape]:
    """A compressor into entries of `width` columns: of windows, or in two series of windows and those before them."""
    columns = series * width
    projections = {**_linear(f"{name}.kv_proj", columns, hidden), **_linear(f"{name}.gate_proj", columns, hidden)}
    return {**projections, f"{name}.position_bias": (rate, columns), f"{name}.kv_norm.weight": (width,)}


def _rate(c: ModelConfig, kind: str) -> int:
    """Tokens of a window: of `compress_rates`, or of the keys that transformers reads in its place."""
    return int(c.get(OLDER_RATES[kind]) or (c.get("compress_rates") or RATES)[kind])


def indexed_layers(c: ModelConfig) -> tuple[int, ...]:
    """Numbers of the layers with an indexer (transformers 5.23, glm_moe_dsa/configuration_glm_moe_dsa.py)."""
    if c.get("compress_ratios") or c.get("compress_rates"):
        return tuple(layer for layer, kind in enumerate(compressed_types(c)) if kind == _SPARSE)
    types = c.get("indexer_types") or c.get("index_topk_pattern")
    if types is not None:
        return tuple(layer for layer, kind in enumerate(types) if kind in ("full", "F"))
    every, offset = max(c.get("index_topk_freq", 1), 1), c.get("index_skip_topk_offset", 2)
    return tuple(layer for layer in range(c["num_hidden_layers"]) if max(layer - offset + 1, 0) % every == 0)


def _linear(name: str, outputs: int, inputs: int, *, biased: bool = False) -> dict[str, Shape]:
    bias = {f"{name}.bias": (outputs,)} if biased else {}
    return {f"{name}.weight": (outputs, inputs), **bias}


def grouped_query_attention(
    *,
    qkv_bias: bool = False,
    reads_bias: bool = True,
    output_bias: bool = True,
    norms: Literal["none", "of heads", "over heads"] = "none",
) -> Callable[[ModelConfig], AttentionTensors]:
    """Grouped-query attention. With `qkv_bias` its three input projections always have biases. `attention_bias` of the
    config gives biases to all four projections, without `output_bias` to the first three, without `reads_bias` to none.
    Queries and keys are normalised not at all, each head by itself with one weight for all, or all heads together.
    """

    def tensors(c: ModelConfig) -> AttentionTensors:
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        width = c.get("head_dim") or hidden // heads
        query, key = heads * width, (c.get("num_key_value_heads") or heads) * width
        biased = qkv_bias or (reads_bias and bool(c.get("attention_bias", False)))
        normed = {"none": (), "of heads": (width, width), "over heads": (query, key)}[norms]
        return AttentionTensors(
            projections={
                **_linear("q_proj", query, hidden, biased=biased),
                **_linear("k_proj", key, hidden, biased=biased),
                **_linear("v_proj", key, hidden, biased=biased),
                **_linear("o_proj", hidden, query, biased=biased and output_bias and not qkv_bias),
            },
            inner_norms={f"{name}.weight": (size,) for name, size in zip(("q_norm", "k_norm"), normed, strict=False)},
            width=2 * heads * width,
        )

    return tensors


def attention_with_sinks(c: ModelConfig) -> AttentionTensors:
    """Grouped-query attention with a sink for each head (gpt_oss)."""
    return replace(grouped_query_attention()(c), inner_norms={"sinks": (int(c["num_attention_heads"]),)})


def glm_attention(c: ModelConfig) -> AttentionTensors:
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
class ExpertKeys:
    """Keys of config.json that give the sizes of routed experts; the defaults are DeepSeek's.

    Its methods read a config.json as published or as transformers 5.23 writes it. KeyError where a key is absent.
    """

    number_keys: tuple[str, ...] = ("n_routed_experts",)
    """Keys of their number in a layer: the published one, and others that transformers writes in its place."""
    per_token_key: str = "num_experts_per_tok"
    width_key: str = "moe_intermediate_size"
    """Key of the inner width of an expert."""

    def number(self, config: Mapping[str, Any]) -> int:
        """Experts of a layer."""
        return int(config[self.number_key(config)])

    def per_token(self, config: Mapping[str, Any]) -> int:
        """Experts that a token is sent to."""
        return int(config[self.per_token_key])

    def width(self, config: Mapping[str, Any]) -> int:
        """Columns of an expert's gate and up projections."""
        return int(config[self.width_key])

    def number_key(self, config: Mapping[str, Any]) -> str:
        """The key of `number_keys` that `config` has; the published one where it has none."""
        return next((key for key in self.number_keys if key in config), self.number_keys[0])


QWEN_EXPERTS = ExpertKeys(number_keys=("num_experts", "num_local_experts"))
"""Published configurations have the first key; transformers 5.23 writes the second."""


@dataclass(frozen=True)
class ParameterRules:
    """How the parameters of a family are counted."""

    attention: Callable[[ModelConfig], AttentionTensors]
    is_sparse: Callable[[ModelConfig, int], bool] = never_sparse
    """Whether layer number i has routed experts instead of a dense MLP."""
    mlp_bias: bool = False
    """Whether `mlp_bias` of the config is read: dense and shared experts have it then, routed experts never."""
    expert_bias: bool = False
    """Whether routed experts and their router have biases."""
    types: Callable[[ModelConfig], tuple[str, ...]] | None = None
    """The kind of attention of each layer, where layers differ in more than experts and indexers."""
    of_type: Callable[[ModelConfig, str], Tensors] = lambda _, __: {}
    """Further tensors of a layer with such a kind, by their names within it."""
    ends: Callable[[ModelConfig], Tensors] = lambda _: {}
    """Further tensors outside of layers."""

    def type_of(self, c: ModelConfig, layer: int) -> str:
        """The kind of attention of layer number `layer`; of layers after the last one, the last one's."""
        kinds = self.types(c) if self.types is not None else ()
        return kinds[min(layer, len(kinds) - 1)] if kinds else ""
