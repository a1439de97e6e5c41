"""The graph of a causal LM: embedding, attention with a cache, MLP or experts, logits; one row of a table for each
model type.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ExportError
from ds_finetune.export.onnx.experts import moe
from ds_finetune.export.onnx.graph import Graph, value
from ds_finetune.export.onnx.layers import Layers, Mask, Read, Rotary, parts_of

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not depend on the length of the input, so that they are constants."""
_BATCH, _LENGTH, _PAST, _TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"

Ends = tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]


@dataclass(frozen=True)
class Cache:
    """Heads of the two tensors that a layer keeps, and their widths."""

    heads: int
    key_width: int
    value_width: int


def decoder_graph(model: PreTrainedModel, read: Read, *, dtype: np.dtype, with_cache: bool) -> tuple[Graph, Ends]:
    """The graph of `model`, which may be without memory, with its inputs and outputs; weights are read when the file is
    written.

    Inputs, all int64: input_ids [batch, length], attention_mask [batch, total] with 1 where a token is,
    position_ids [batch, length]; with a cache past_key_values.N.key and .value [batch, heads, past, width], where
    past may be 0 and total is past + length. Outputs: logits [batch, length, vocabulary], and present.N.key and
    .value of `total` with a cache.
    """
    graph = Graph(dtype)
    layers = Layers(graph, model, read)
    config = model.config
    attention, cache = ATTENTION[parts_of(config).attention](config)
    mask, rotary = _mask(graph), _rotary(graph, model)
    hidden = graph.op(
        "Gather",
        layers.stored("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)),
        "input_ids",
        axis=0,
    )
    for number in range(config.num_hidden_layers):
        name = f"model.layers.{number}"
        normed = layers.norm(hidden, f"{name}.input_layernorm")
        kept = _kept(graph, number) if with_cache else _unchanged
        hidden = graph.op(
            "Add", hidden, attention(_Scope(layers, config, mask, rotary, kept), normed, f"{name}.self_attn")
        )
        normed = layers.norm(hidden, f"{name}.post_attention_layernorm")
        is_sparse = hasattr(layers.module(f"{name}.mlp"), "experts")
        hidden = graph.op(
            "Add",
            hidden,
            moe(layers, normed, f"{name}.mlp", config) if is_sparse else layers.mlp(normed, f"{name}.mlp"),
        )
    _head(layers, layers.norm(hidden, "model.norm"), config)
    return graph, _ends(config, dtype, cache if with_cache else None)


def check_config(config: PretrainedConfig) -> None:
    """ExportError where the graph of this model would not be the model: another type, activation, rotary embedding or
    attention.
    """
    parts = parts_of(config)
    kind = config.rope_parameters["rope_type"]
    if kind not in _STATIC_ROPE:
        raise ExportError(
            f"rope_type `{kind}` depends on the length of the input", hint=f"exported are {', '.join(_STATIC_ROPE)}"
        )
    if config.hidden_act != "silu":
        raise ExportError(f"hidden_act `{config.hidden_act}` has no ONNX graph here", hint="exported is silu")
    sliding = [
        number for number, kind in enumerate(getattr(config, "layer_types", None) or ()) if kind != "full_attention"
    ]
    if sliding:
        raise ExportError(
            f"layers {sliding} have no full attention (layer_types in config.json)",
            hint="exported is full attention alone",
        )
    method = getattr(config, "topk_method", None) if parts.router == "softmax" else "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ExportError(
            f"topk_method `{method}` is not one of {config.model_type}", hint="it is greedy or group_limited_greedy"
        )


Kept = Callable[[str, str], tuple[str, str]]
"""From a layer's new key and value to those of all tokens so far."""


def _unchanged(key: str, value_: str) -> tuple[str, str]:
    return key, value_


def _kept(graph: Graph, number: int) -> Kept:
    def joined(new: str, part: str) -> str:
        return graph.op("Concat", f"past_key_values.{number}.{part}", new, axis=2, name=f"present.{number}.{part}")

    return lambda key, value_: (joined(key, "key"), joined(value_, "value"))


@dataclass(frozen=True)
class _Scope:
    """What attention needs beside its input."""

    layers: Layers
    config: PretrainedConfig
    mask: Mask
    rotary: Rotary
    kept: Kept


def _grouped_query(config: PretrainedConfig) -> tuple[Callable[[_Scope, str, str], str], Cache]:
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads

    def attention(scope: _Scope, x: str, name: str) -> str:
        layers, graph = scope.layers, scope.layers.graph
        module = layers.module(name)
        query, key = (
            layers.heads(layers.linear(x, f"{name}.{part}_proj"), n, width)
            for part, n in (("q", heads), ("k", key_heads))
        )
        if hasattr(module, "q_norm"):
            query, key = layers.norm(query, f"{name}.q_norm"), layers.norm(key, f"{name}.k_norm")
        query, key = (scope.rotary.rotate(layers.heads_first(part)) for part in (query, key))
        value_ = layers.heads_first(layers.heads(layers.linear(x, f"{name}.v_proj"), key_heads, width))
        key, value_ = scope.kept(key, value_)
        query = graph.op("Mul", query, graph.scalar(module.scaling))
        mixed = scope.mask.attend(query, key, value_, heads=heads, key_heads=key_heads)
        return layers.linear(layers.merged(mixed), f"{name}.o_proj")

    return attention, Cache(key_heads, width, width)


def _latent(config: PretrainedConfig) -> tuple[Callable[[_Scope, str, str], str], Cache]:
    """Multi-head latent attention on the cached latents themselves (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

    The cache is what transformers 5.23 keeps: the normed latent as key and the rotated shared key as value, one
    head each. kv_b_proj is not applied to the cache: its key part goes into the query and its value part into the
    output, so a decoded token costs heads x (2 x rank + rope) per cached position instead of rank x heads x (nope +
    value).
    """
    heads, rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    nope, width = config.qk_nope_head_dim, config.v_head_dim

    def attention(scope: _Scope, x: str, name: str) -> str:
        layers, graph = scope.layers, scope.layers.graph
        module = layers.module(name)
        query = layers.linear(x, f"{name}.q_proj") if config.q_lora_rank is None else _low_rank_query(layers, x, name)
        query = layers.heads_first(layers.heads(query, heads, nope + rope))
        plain, rotated = graph.ops("Split", query, graph.ints(nope, rope), names=2, axis=-1)
        latent, shared = graph.ops(
            "Split", layers.linear(x, f"{name}.kv_a_proj_with_mqa"), graph.ints(rank, rope), names=2, axis=-1
        )
        latent = graph.op("Unsqueeze", layers.norm(latent, f"{name}.kv_a_layernorm"), graph.ints(1))
        shared = scope.rotary.rotate(graph.op("Unsqueeze", shared, graph.ints(1)))
        latent, shared = scope.kept(latent, shared)
        to_key, to_value = _unpacked(layers, f"{name}.kv_b_proj", heads, (nope, width))
        query = graph.op("Concat", graph.op("MatMul", plain, to_key), scope.rotary.rotate(rotated), axis=-1)
        query = graph.op("Mul", query, graph.scalar(module.scaling))
        key = graph.op("Concat", latent, shared, axis=-1)
        mixed = graph.op("MatMul", scope.mask.attend(query, key, latent, heads=heads, key_heads=1), to_value)
        return layers.linear(layers.merged(mixed), f"{name}.o_proj")

    return attention, Cache(1, rank, rope)


def _low_rank_query(layers: Layers, x: str, name: str) -> str:
    return layers.linear(layers.norm(layers.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm"), f"{name}.q_b_proj")


def _unpacked(layers: Layers, name: str, heads: int, widths: tuple[int, int]) -> tuple[str, str]:
    """kv_b_proj [heads * (nope + value), rank] as its key part [heads, nope, rank] and its value part [heads, rank,
    value].
    """
    graph, key, (nope, width) = layers.graph, f"{name}.weight", widths
    rank = layers.module(name).weight.shape[1]

    def by_head(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(heads, nope + width, rank)

    to_key = graph.weight(f"{key}_key", (heads, nope, rank), lambda: layers.arrays(key, lambda t: by_head(t)[:, :nope]))
    to_value = graph.weight(
        f"{key}_value", (heads, rank, width), lambda: layers.arrays(key, lambda t: by_head(t)[:, nope:].transpose(1, 2))
    )
    return to_key, to_value


ATTENTION: Mapping[str, Callable[[PretrainedConfig], tuple[Callable[[_Scope, str, str], str], Cache]]] = {
    "latent": _latent,
    "grouped_query": _grouped_query,
}
"""Attention by the kind that a family's `OnnxGraph` names, and what it keeps."""


def _mask(graph: Graph) -> Mask:
    """Keys up to a query's own place among all tokens, past ones included, that attention_mask does not leave out."""
    total, length = graph.op("Shape", "attention_mask", start=1, end=2), graph.op("Shape", "input_ids", start=1, end=2)
    end, past = (graph.op("Squeeze", size, graph.ints(0)) for size in (total, graph.op("Sub", total, length)))
    keys = graph.op("Range", graph.scalar(0, np.int64), end, graph.scalar(1, np.int64))
    queries = graph.op("Unsqueeze", graph.op("Range", past, end, graph.scalar(1, np.int64)), graph.ints(1))
    causal = graph.op("LessOrEqual", keys, queries)
    is_token = graph.op("Unsqueeze", graph.cast("attention_mask", np.bool_), graph.ints(1, 2))
    return Mask(graph, graph.op("And", causal, is_token), total)


def _rotary(graph: Graph, model: PreTrainedModel) -> Rotary:
    """Angles in fp32 from the frequencies that transformers computes for this config, YaRN's scaling included."""
    config = model.config
    own = model.model.rotary_emb
    made = type(own)(config)
    frequencies = made.inv_freq.to(torch.float32).numpy()
    positions = graph.cast(graph.op("Unsqueeze", "position_ids", graph.ints(1, 3)), np.float32)
    angles = graph.op("Mul", positions, graph.constant(frequencies))
    scale = graph.scalar(made.attention_scaling, np.float32)
    tables = [graph.op("Mul", graph.op(kind, angles), scale) for kind in ("Cos", "Sin")]
    cos, sin = (graph.cast(table, graph.dtype) if graph.is_half() else table for table in tables)
    is_interleaved = parts_of(config).is_rotary_interleaved
    pairs_in = is_interleaved or bool(getattr(config, "rope_interleave", False))
    return Rotary(graph, cos, sin, 2 * len(frequencies), pairs_in=pairs_in, pairs_out=is_interleaved)


def _head(layers: Layers, x: str, config: PretrainedConfig) -> None:
    graph = layers.graph
    if config.tie_word_embeddings:
        graph.op("MatMul", x, graph.op("Transpose", "model.embed_tokens.weight", perm=[1, 0]), name="logits")
    else:
        graph.op("Identity", layers.linear(x, "lm_head"), name="logits")


def _ends(config: PretrainedConfig, dtype: np.dtype, cache: Cache | None) -> Ends:
    inputs = [value("input_ids", np.int64, (_BATCH, _LENGTH)), value("attention_mask", np.int64, (_BATCH, _TOTAL))]
    inputs.append(value("position_ids", np.int64, (_BATCH, _LENGTH)))
    outputs = [value("logits", dtype, (_BATCH, _LENGTH, config.vocab_size))]
    for number in range(config.num_hidden_layers if cache else 0):
        assert cache is not None
        for part, width in (("key", cache.key_width), ("value", cache.value_width)):
            inputs.append(value(f"past_key_values.{number}.{part}", dtype, (_BATCH, cache.heads, _PAST, width)))
            outputs.append(value(f"present.{number}.{part}", dtype, (_BATCH, cache.heads, _TOTAL, width)))
    return inputs, outputs
