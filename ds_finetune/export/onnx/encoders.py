"""Builds the ONNX graphs of encoders that classify texts: BERT-like models and ModernBERT."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ExportError
from ds_finetune.export.onnx.graph import BATCH, LENGTH, Graph, GraphEnds, value
from ds_finetune.export.onnx.layers import Layers, Mask, Read, Rotary, parts_of, token_positions
from ds_finetune.families.family import Encoder
from ds_finetune.families.table import family_of

TOKEN_TYPES = "token_type_ids"
_GELU = "gelu"


def encoder_graph(model: PreTrainedModel, read: Read, *, dtype: np.dtype) -> tuple[Graph, GraphEnds]:
    """Build the ONNX graph of the encoder classifier `model`, which may be on the meta device. Returns graph, inputs
    and outputs.

    The inputs, all int64 [batch, length], are input_ids, attention_mask with 0 for padding, and for BERT
    token_type_ids. The output is logits [batch, labels]. Weights are read by `read` when the file is written.
    """
    graph, config = Graph(dtype), model.config
    kind = family_of(config.model_type).encoder
    assert kind is not None
    build = ENCODER_GRAPHS[parts_of(config).attention]
    graph.op("Identity", build(_EncoderModules(Layers(graph, model, read), config, kind)), name="logits")
    names = ["input_ids", "attention_mask", *([TOKEN_TYPES] if kind.has_token_types else [])]
    inputs = [value(name, np.int64, (BATCH, LENGTH)) for name in names]
    return graph, (inputs, [value("logits", dtype, (BATCH, config.num_labels))])


def check_encoder_config(config: PretrainedConfig) -> None:
    """Raise ExportError if ONNX graphs do not support an activation or the rotary embedding of the encoder."""
    names = [name for name in ("hidden_act", "hidden_activation", "classifier_activation") if hasattr(config, name)]
    wrong = [f"{name} `{getattr(config, name)}`" for name in names if getattr(config, name) != _GELU]
    kinds = {each["rope_type"] for each in (getattr(config, "rope_parameters", None) or {}).values() if each}
    wrong += [f"rope_type `{kind}`" for kind in sorted(kinds - {"default"})]
    if wrong:
        raise ExportError(
            f"ONNX graphs of model_type `{config.model_type}` do not support {', '.join(wrong)}",
            hint=f"only {_GELU} and the default rotary embedding are supported: export with --format safetensors",
        )


@dataclass(frozen=True)
class _EncoderModules:
    """An encoder's modules and configuration, with methods that add its operations to the ONNX graph."""

    layers: Layers
    config: PretrainedConfig
    kind: Encoder

    @property
    def graph(self) -> Graph:
        return self.layers.graph

    def embed(self, name: str, ids: str) -> str:
        return self.graph.op("Gather", self.layers.weight(f"{name}.weight"), ids, axis=0)

    def norm(self, x: str, name: str) -> str:
        """Add a LayerNorm over the last dimension in fp32, without bias if the module has none."""
        module, graph = self.layers.module(name), self.graph
        weight = self.layers.weight(f"{name}.weight")
        bias = [] if module.bias is None else [self.layers.weight(f"{name}.bias")]
        return graph.op("LayerNormalization", x, weight, *bias, axis=-1, epsilon=module.eps)

    def gelu(self, x: str) -> str:
        """Add the exact GELU in fp32: x / 2 x (1 + erf(x / sqrt 2))."""
        graph = self.graph
        wide = graph.cast(x, np.float32) if graph.is_half() else x
        erf = graph.op("Erf", graph.op("Mul", wide, graph.scalar(math.sqrt(0.5), np.float32)))
        half = graph.op("Mul", wide, graph.scalar(0.5, np.float32))
        y = graph.op("Mul", half, graph.op("Add", erf, graph.scalar(1, np.float32)))
        return graph.cast(y, graph.dtype) if graph.is_half() else y

    def attend(self, parts: tuple[str, str, str], mask: Mask) -> str:
        """Add bidirectional attention on query, key and value [batch, heads, length, width], and merge the heads."""
        query, key, states = parts
        heads = self.config.num_attention_heads
        scale = self.graph.scalar((self.config.hidden_size // heads) ** -0.5)
        mixed = mask.attend(self.graph.op("Mul", query, scale), key, states, heads=heads, key_heads=heads)
        return self.layers.merge_heads(mixed)

    def heads(self, x: str) -> str:
        """Split heads: [batch, length, heads * width] becomes [batch, heads, length, width]."""
        count = self.config.num_attention_heads
        return self.layers.heads_first(self.layers.heads(x, count, self.config.hidden_size // count))

    def mask(self, *, window: int | None = None) -> Mask:
        """Make a mask that excludes padding and, with a `window`, tokens more than `window` positions away."""
        graph = self.graph
        total = graph.op("Shape", "input_ids", start=1, end=2)
        allowed = graph.op("Unsqueeze", graph.cast("attention_mask", np.bool_), graph.ints(1, 2))
        if window is not None:
            positions = token_positions(graph)
            distance = graph.op("Sub", positions, graph.op("Unsqueeze", positions, graph.ints(1)))
            near = graph.op("LessOrEqual", graph.op("Abs", distance), graph.scalar(window, np.int64))
            allowed = graph.op("And", allowed, near)
        return Mask(graph, allowed, total)

    def first(self, x: str) -> str:
        """Select the hidden state of each row's first token, [batch, width]."""
        return self.graph.op("Gather", x, self.graph.scalar(0, np.int64), axis=1)


def _post_norm(encoder: _EncoderModules) -> str:
    """Add an encoder with norms after attention and MLP (BERT, arXiv 1810.04805); returns the class scores."""
    graph, layers, prefix = encoder.graph, encoder.layers, encoder.layers.model.base_model_prefix
    if encoder.kind.positions_follow_padding:
        # RoBERTa's positions count only tokens that are not padding (transformers 5.23,
        # roberta/modeling_roberta.py:142-156).
        pad = graph.scalar(encoder.config.pad_token_id, np.int64)
        is_token = graph.cast(graph.op("Not", graph.op("Equal", "input_ids", pad)), np.int64)
        counted = graph.op("Mul", graph.op("CumSum", is_token, graph.scalar(1, np.int64)), is_token)
        positions = graph.op("Add", counted, pad)
    else:
        positions = token_positions(graph)
    token_types = TOKEN_TYPES if encoder.kind.has_token_types else graph.op("Sub", "input_ids", "input_ids")
    mask = encoder.mask()
    embeddings = (("word", "input_ids"), ("token_type", token_types), ("position", positions))
    words, types, at = (encoder.embed(f"{prefix}.embeddings.{name}_embeddings", ids) for name, ids in embeddings)
    hidden = encoder.norm(graph.op("Add", graph.op("Add", words, types), at), f"{prefix}.embeddings.LayerNorm")
    for number in range(encoder.config.num_hidden_layers):
        name = f"{prefix}.encoder.layer.{number}"
        projections = (f"{name}.attention.self.{part}" for part in ("query", "key", "value"))
        query, key, states = (encoder.heads(layers.linear(hidden, part)) for part in projections)
        mixed = layers.linear(encoder.attend((query, key, states), mask), f"{name}.attention.output.dense")
        hidden = encoder.norm(graph.op("Add", mixed, hidden), f"{name}.attention.output.LayerNorm")
        inner = encoder.gelu(layers.linear(hidden, f"{name}.intermediate.dense"))
        outer = layers.linear(inner, f"{name}.output.dense")
        hidden = encoder.norm(graph.op("Add", outer, hidden), f"{name}.output.LayerNorm")
    first = encoder.first(hidden)
    pooler = next((name for name in encoder.kind.head if name.endswith(".pooler")), None)
    inner, outer = (f"{pooler}.dense", "classifier") if pooler else ("classifier.dense", "classifier.out_proj")
    return layers.linear(graph.op("Tanh", layers.linear(first, inner)), outer)


def _pre_norm(encoder: _EncoderModules) -> str:
    """Add an encoder with norms before attention and MLP (ModernBERT, arXiv 2412.13663); returns the class scores."""
    graph, layers, config = encoder.graph, encoder.layers, encoder.config
    kinds = sorted(set(config.layer_types))
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    masks = {kind: encoder.mask(window=windows[kind]) for kind in kinds}
    rotary = {kind: _layer_rotary(encoder, kind) for kind in kinds}
    hidden = encoder.norm(encoder.embed("model.embeddings.tok_embeddings", "input_ids"), "model.embeddings.norm")
    for number, kind in enumerate(config.layer_types):
        name = f"model.layers.{number}"
        # ModernBERT's first layer has no norm before its attention.
        normed = encoder.norm(hidden, f"{name}.attn_norm") if number else hidden
        joined = layers.linear(normed, f"{name}.attn.Wqkv")
        query, key, states = map(encoder.heads, graph.ops("Split", joined, names=3, axis=-1, num_outputs=3))
        parts = (rotary[kind].rotate(query), rotary[kind].rotate(key), states)
        mixed = layers.linear(encoder.attend(parts, masks[kind]), f"{name}.attn.Wo")
        hidden = graph.op("Add", hidden, mixed)
        wide = layers.linear(encoder.norm(hidden, f"{name}.mlp_norm"), f"{name}.mlp.Wi")
        inner, gate = graph.ops("Split", wide, names=2, axis=-1, num_outputs=2)
        outer = layers.linear(graph.op("Mul", encoder.gelu(inner), gate), f"{name}.mlp.Wo")
        hidden = graph.op("Add", hidden, outer)
    hidden = encoder.norm(hidden, "model.final_norm")
    takes_first = getattr(config, str(encoder.kind.pooling_key)) == "cls"
    pooled = encoder.first(hidden) if takes_first else _mean(encoder, hidden)
    dense = encoder.gelu(layers.linear(pooled, "head.dense"))
    return layers.linear(encoder.norm(dense, "head.norm"), "classifier")


def _mean(encoder: _EncoderModules, hidden: str) -> str:
    graph = encoder.graph
    wide = graph.cast(hidden, np.float32) if graph.is_half() else hidden
    mask = graph.cast(graph.op("Unsqueeze", "attention_mask", graph.ints(2)), np.float32)
    sums = graph.op("ReduceSum", graph.op("Mul", wide, mask), graph.ints(1), keepdims=0)
    mean = graph.op("Div", sums, graph.op("ReduceSum", mask, graph.ints(1), keepdims=0))
    return graph.cast(mean, graph.dtype) if graph.is_half() else mean


def _layer_rotary(encoder: _EncoderModules, kind: str) -> Rotary:
    graph = encoder.graph
    embedding = type(encoder.layers.module("model.rotary_emb"))(encoder.config)
    frequencies = getattr(embedding, f"{kind}_inv_freq").float().numpy()
    return Rotary.of(graph, graph.op("Unsqueeze", token_positions(graph), graph.ints(0, 1, 3)), frequencies)


ENCODER_GRAPHS: Mapping[str, Callable[[_EncoderModules], str]] = {"post_norm": _post_norm, "pre_norm": _pre_norm}
"""Builders of encoder graphs, by the name in a family's `OnnxGraph`."""
