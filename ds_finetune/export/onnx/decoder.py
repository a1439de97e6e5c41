"""Builds the ONNX graph of a causal model: embedding, attention with a cache, MLP or experts, and logits or scores."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ExportError
from ds_finetune.export.onnx.experts import moe
from ds_finetune.export.onnx.graph import BATCH, LENGTH, Graph, GraphEnds, value
from ds_finetune.export.onnx.layers import Layers, Mask, Read, Rotary, parts_of, token_positions

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Types of rotary embedding whose frequencies do not depend on the length of the input."""
_PAST, _TOTAL = "past_sequence_length", "total_sequence_length"


@dataclass(frozen=True)
class Cache:
    """Shape of the keys and values that a layer of an ONNX graph caches: number of heads, widths of key and value."""

    heads: int
    key_width: int
    value_width: int


def decoder_graph(model: PreTrainedModel, read: Read, *, dtype: np.dtype, with_cache: bool) -> tuple[Graph, GraphEnds]:
    """Build the ONNX graph of `model`, which may be on the meta device. Returns the graph, and its inputs and outputs.

    Weights are read by `read` when the file is written. The int64 inputs are input_ids [batch, length], attention_mask
    [batch, total] with 0 for padding, and position_ids [batch, length]. With a cache, there are also
    past_key_values.N.key and .value [batch, heads, past, width], where past may be 0 and total is past + length. The
    outputs are logits [batch, length, vocabulary], and with a cache present.N.key and .value of length total.
    """
    graph = Graph(dtype)
    layers = Layers(graph, model, read)
    config = model.config
    hidden = _last_hidden_states(layers, "position_ids", with_cache=with_cache)
    if config.tie_word_embeddings:
        # Gemm reads the embedding as stored, while ONNX Runtime's MatMul would allocate a transposed copy.
        rows = graph.op("Reshape", hidden, graph.ints(-1, config.hidden_size))
        logits = graph.op("Gemm", rows, "model.embed_tokens.weight", transB=1)
        sizes = graph.op("Concat", graph.op("Shape", "input_ids"), graph.ints(config.vocab_size), axis=0)
        graph.op("Reshape", logits, sizes, name="logits")
    else:
        graph.op("Identity", layers.linear(hidden, "lm_head"), name="logits")
    inputs = [value("input_ids", np.int64, (BATCH, LENGTH)), value("attention_mask", np.int64, (BATCH, _TOTAL))]
    inputs.append(value("position_ids", np.int64, (BATCH, LENGTH)))
    outputs = [value("logits", dtype, (BATCH, LENGTH, config.vocab_size))]
    _, cache = ATTENTION[parts_of(config).attention](config)
    for number in range(config.num_hidden_layers if with_cache else 0):
        for part, width in (("key", cache.key_width), ("value", cache.value_width)):
            inputs.append(value(f"past_key_values.{number}.{part}", dtype, (BATCH, cache.heads, _PAST, width)))
            outputs.append(value(f"present.{number}.{part}", dtype, (BATCH, cache.heads, _TOTAL, width)))
    return graph, (inputs, outputs)


def scoring_graph(model: PreTrainedModel, read: Read, *, dtype: np.dtype) -> tuple[Graph, GraphEnds]:
    """Build the ONNX graph of the decoder classifier `model`, which scores the last token that the attention mask
    allows.

    The int64 inputs are input_ids and attention_mask (0 for padding), both [batch, length]. The output is logits
    [batch, labels].
    """
    graph = Graph(dtype)
    layers, config = Layers(graph, model, read), model.config
    counted = graph.op("CumSum", "attention_mask", graph.scalar(1, np.int64))
    before = graph.op("Sub", counted, graph.scalar(1, np.int64))
    positions = graph.op("Max", before, graph.scalar(0, np.int64))
    hidden = _last_hidden_states(layers, positions, with_cache=False)
    positions_in_row = token_positions(graph)
    last = graph.op("ReduceMax", graph.op("Mul", positions_in_row, "attention_mask"), graph.ints(1), keepdims=1)
    pooled = graph.op("GatherND", hidden, last, batch_dims=1)
    graph.op("Identity", layers.linear(pooled, "score"), name="logits")
    inputs = [value(name, np.int64, (BATCH, LENGTH)) for name in ("input_ids", "attention_mask")]
    return graph, (inputs, [value("logits", dtype, (BATCH, config.num_labels))])


def _last_hidden_states(layers: Layers, positions: str, *, with_cache: bool) -> str:
    """Add all layers and the final norm for `positions` [batch, length]; returns states [batch, length, width]."""
    graph, config = layers.graph, layers.model.config
    attention, _ = ATTENTION[parts_of(config).attention](config)
    mask = _mask(graph)
    # The model may be on the meta device, so its rotary embedding is built again from the config.
    embedding = type(layers.model.model.rotary_emb)(config)
    frequencies, scaling = embedding.inv_freq.to(torch.float32).numpy(), float(embedding.attention_scaling)
    is_interleaved = parts_of(config).is_rotary_interleaved
    pairs_in = is_interleaved or bool(getattr(config, "rope_interleave", False))
    positions = graph.op("Unsqueeze", positions, graph.ints(1, 3))
    rotary = Rotary.of(graph, positions, frequencies, scaling, pairs_in=pairs_in, pairs_out=is_interleaved)
    hidden = graph.op("Gather", layers.weight("model.embed_tokens.weight"), "input_ids", axis=0)
    for number in range(config.num_hidden_layers):
        name = f"model.layers.{number}"
        normed = layers.norm(hidden, f"{name}.input_layernorm")
        scope = _AttentionScope(layers, mask, rotary, number, with_cache)
        hidden = graph.op("Add", hidden, attention(scope, normed, f"{name}.self_attn"))
        normed = layers.norm(hidden, f"{name}.post_attention_layernorm")
        is_sparse = hasattr(layers.module(f"{name}.mlp"), "experts")
        mixed = moe(layers, normed, f"{name}.mlp", config) if is_sparse else layers.mlp(normed, f"{name}.mlp")
        hidden = graph.op("Add", hidden, mixed)
    return layers.norm(hidden, "model.norm")


def check_config(config: PretrainedConfig) -> None:
    """Raise ExportError if no ONNX graph exists for the model's type, activation, rotary embedding or attention."""
    parts = parts_of(config)
    if parts.attention not in ATTENTION:
        raise ExportError(
            f"model_type `{config.model_type}` is an encoder, and config.json names the class {config.architectures}",
            hint="encoders can only be exported to ONNX as classifiers (...ForSequenceClassification)",
        )
    rope, window = config.rope_parameters["rope_type"], getattr(config, "sliding_window", None)
    kinds = enumerate(getattr(config, "layer_types", None) or ())
    sliding = [number for number, kind in kinds if kind != "full_attention"]
    has_window = window is not None and not hasattr(type(config), "layer_types")
    length = f"which depends on the length of the input (they support {', '.join(_STATIC_ROPE)})"
    limits = {
        f"do not support rope_type `{rope}`, {length}": rope not in _STATIC_ROPE,
        f"do not support hidden_act `{config.hidden_act}`, only silu": config.hidden_act != "silu",
        f"support only full attention, and layers {sliding} have another (layer_types in config.json)": bool(sliding),
        f"support only full attention, and config.json has sliding_window {window}": has_window,
        f"do not support clip_qkv {(clip := getattr(config, 'clip_qkv', None))} of config.json": clip is not None,
    }
    wrong = next((text for text, is_wrong in limits.items() if is_wrong), None)
    if wrong:
        raise ExportError(f"ONNX graphs {wrong}", hint="export with --format safetensors")
    method = getattr(config, "topk_method", None) if parts.router == "grouped_softmax" else "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ExportError(
            f"topk_method `{method}` in config.json is unknown for model_type {config.model_type}",
            hint="known methods are greedy and group_limited_greedy",
        )


@dataclass(frozen=True)
class _AttentionScope:
    layers: Layers
    mask: Mask
    rotary: Rotary
    number: int
    with_cache: bool

    def update_cache(self, **new: str) -> list[str]:
        """Add a layer's new keys and values to its cached ones. Returns the keys and values of all tokens."""
        if not self.with_cache:
            return [*new.values()]
        parts = ((f"{self.number}.{part}", states) for part, states in new.items())
        op = self.layers.graph.op
        return [op("Concat", f"past_key_values.{n}", x, axis=2, name=f"present.{n}") for n, x in parts]


def _grouped_query(config: PretrainedConfig) -> tuple[Callable[[_AttentionScope, str, str], str], Cache]:
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads

    def attention(scope: _AttentionScope, x: str, name: str) -> str:
        layers, graph = scope.layers, scope.layers.graph
        module = layers.module(name)
        query, key = (layers.linear(x, f"{name}.{part}_proj") for part in "qk")
        if layers.family.normalises_over_heads:
            query, key = (layers.norm(part, f"{name}.{norm}") for part, norm in ((query, "q_norm"), (key, "k_norm")))
        query, key = layers.heads(query, heads, width), layers.heads(key, key_heads, width)
        if hasattr(module, "q_norm") and not layers.family.normalises_over_heads:
            query, key = layers.norm(query, f"{name}.q_norm"), layers.norm(key, f"{name}.k_norm")
        query, key = (scope.rotary.rotate_first(layers.heads_first(part), width) for part in (query, key))
        value_ = layers.heads_first(layers.heads(layers.linear(x, f"{name}.v_proj"), key_heads, width))
        key, value_ = scope.update_cache(key=key, value=value_)
        query = graph.op("Mul", query, graph.scalar(module.scaling))
        mixed = scope.mask.attend(query, key, value_, heads=heads, key_heads=key_heads)
        return layers.linear(layers.merge_heads(mixed), f"{name}.o_proj")

    return attention, Cache(key_heads, width, width)


def _latent(config: PretrainedConfig) -> tuple[Callable[[_AttentionScope, str, str], str], Cache]:
    """Multi-head latent attention computed on the cached latents (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

    The cache is laid out as in transformers 5.23, with one head: the normed latent as key, the rotated shared key as
    value. kv_b_proj is not applied to the cache; instead its key part is applied to the query and its value part to the
    output. So a decoded token costs heads x (2 x rank + rope) products per cached position instead of rank x heads x
    (nope + value).
    """
    heads, rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    nope, width = config.qk_nope_head_dim, config.v_head_dim

    def attention(scope: _AttentionScope, x: str, name: str) -> str:
        layers, graph = scope.layers, scope.layers.graph
        module = layers.module(name)
        if config.q_lora_rank is None:
            query = layers.linear(x, f"{name}.q_proj")
        else:
            compressed = layers.norm(layers.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm")
            query = layers.linear(compressed, f"{name}.q_b_proj")
        query = layers.heads_first(layers.heads(query, heads, nope + rope))
        plain, rotated = graph.ops("Split", query, graph.ints(nope, rope), names=2, axis=-1)
        joined = layers.linear(x, f"{name}.kv_a_proj_with_mqa")
        latent, shared = graph.ops("Split", joined, graph.ints(rank, rope), names=2, axis=-1)
        latent = graph.op("Unsqueeze", layers.norm(latent, f"{name}.kv_a_layernorm"), graph.ints(1))
        shared = scope.rotary.rotate(graph.op("Unsqueeze", shared, graph.ints(1)))
        latent, shared = scope.update_cache(key=latent, value=shared)
        # The heads of kv_b_proj are split into keys [heads, nope, rank] and values [heads, rank, value].
        weight, by_head = f"{name}.kv_b_proj.weight", (heads, nope + width, rank)
        to_key = layers.weight(weight, lambda t: t.view(by_head)[:, :nope], name=f"{weight}_key")
        to_value = layers.weight(weight, lambda t: t.view(by_head)[:, nope:].transpose(1, 2), name=f"{weight}_value")
        query = graph.op("Concat", graph.op("MatMul", plain, to_key), scope.rotary.rotate(rotated), axis=-1)
        query = graph.op("Mul", query, graph.scalar(module.scaling))
        key = graph.op("Concat", latent, shared, axis=-1)
        mixed = graph.op("MatMul", scope.mask.attend(query, key, latent, heads=heads, key_heads=1), to_value)
        return layers.linear(layers.merge_heads(mixed), f"{name}.o_proj")

    return attention, Cache(1, rank, rope)


ATTENTION: Mapping[str, Callable[[PretrainedConfig], tuple[Callable[[_AttentionScope, str, str], str], Cache]]] = {
    "latent": _latent,
    "grouped_query": _grouped_query,
}
"""Builders of attention layers and their cache shapes, by the attention's name in a family's `OnnxGraph`."""


def _mask(graph: Graph) -> Mask:
    """Make the causal attention mask over cached and new tokens, which also excludes padding."""
    total, length = graph.op("Shape", "attention_mask", start=1, end=2), graph.op("Shape", "input_ids", start=1, end=2)
    end, past = (graph.op("Squeeze", size, graph.ints(0)) for size in (total, graph.op("Sub", total, length)))
    keys = graph.op("Range", graph.scalar(0, np.int64), end, graph.scalar(1, np.int64))
    queries = graph.op("Unsqueeze", graph.op("Range", past, end, graph.scalar(1, np.int64)), graph.ints(1))
    causal = graph.op("LessOrEqual", keys, queries)
    is_token = graph.op("Unsqueeze", graph.cast("attention_mask", np.bool_), graph.ints(1, 2))
    return Mask(graph, graph.op("And", causal, is_token), total)
