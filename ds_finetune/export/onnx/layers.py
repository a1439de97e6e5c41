"""Adds the layers of a decoder to an ONNX graph, from transformers' modules and tensors of a Hugging Face folder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.export.formats import ONNX
from ds_finetune.export.onnx.graph import Graph
from ds_finetune.export.shards import PIECE_NUMEL
from ds_finetune.export.source import check_finite
from ds_finetune.families.family import Family, OnnxGraph
from ds_finetune.families.table import family_of
from ds_finetune.model.weights.names import published_name

Read = Callable[[str], torch.Tensor]
"""Function that reads a full tensor, by its name in published checkpoints, to the CPU."""


def parts_of(config: PretrainedConfig) -> OnnxGraph:
    """Look up the ONNX settings of the model's family; ExportError if the family cannot be exported to ONNX."""
    parts = ONNX.check_model_type(config.model_type).onnx
    assert parts is not None
    return parts


@dataclass(frozen=True)
class Layers:
    """Adds modules of `model`, which may be on the meta device, to the ONNX graph; `read` reads their weights."""

    graph: Graph
    model: PreTrainedModel
    read: Read

    @property
    def family(self) -> Family:
        """Family of the exported model."""
        return family_of(self.model.config.model_type)

    def module(self, name: str) -> Any:  # noqa: ANN401 - each class of transformers has attributes of its own
        """The module `name` of transformers' model."""
        return self.model.get_submodule(name)

    def linear(self, x: str, name: str) -> str:
        """Add the linear layer `name`; its weight is stored as [in, out], as MatMul and quantisation tools expect."""
        weight = self.weight(f"{name}.weight", torch.t, name=f"{name}.weight_transposed")
        y = self.graph.op("MatMul", x, weight)
        return y if self.module(name).bias is None else self.graph.op("Add", y, self.weight(f"{name}.bias"))

    def weight(
        self,
        key: str,
        change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous,
        *,
        name: str = "",
        dtype: np.dtype | None = None,
    ) -> str:
        """Add the model's tensor `key`, changed by the function `change`, to the graph under `name` (by default `key`).
        Its dtype is the graph's unless `dtype` is given, e.g. fp32 for routers. Fused experts are not supported.
        """
        module, _, leaf = key.rpartition(".")
        shape, stored = tuple(change(getattr(self.module(module), leaf)).shape), published_name(key, self.family)

        def pieces() -> Iterator[np.ndarray]:
            # Embedding and head are the largest tensors of small models, so they are cast in chunks of bounded size.
            changed = change(self.read(stored))
            for part in changed.split(max(PIECE_NUMEL * len(changed) // changed.numel(), 1)):
                yield array_of(part, dtype or self.graph.dtype, key)

        return self.graph.weight(name or key, shape, pieces, dtype)

    def norm(self, x: str, name: str) -> str:
        """Add an RMSNorm over the last dimension, computed in fp32 as in transformers, with the module's epsilon."""
        graph, module = self.graph, self.module(name)
        wide = graph.cast(x, np.float32) if graph.is_half() else x
        square = graph.op("Pow", wide, graph.scalar(2, np.float32))
        mean = graph.op("ReduceMean", square, graph.ints(-1), keepdims=1)
        root = graph.op("Sqrt", graph.op("Add", mean, graph.scalar(module.variance_epsilon, np.float32)))
        scaled = graph.op("Div", wide, root)
        narrow = graph.cast(scaled, graph.dtype) if graph.is_half() else scaled
        return graph.op("Mul", narrow, self.weight(f"{name}.weight"))

    def mlp(self, x: str, name: str) -> str:
        """Add a gated MLP: down(silu(gate(x)) * up(x))."""
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(self.graph.op("Mul", silu(self.graph, gate), up), f"{name}.down_proj")

    def heads(self, x: str, count: int, width: int) -> str:
        """Reshape [batch, length, count * width] to [batch, length, count, width]."""
        return self.graph.op("Reshape", x, self.graph.ints(0, 0, count, width))

    def heads_first(self, x: str) -> str:
        """Transpose [batch, length, heads, width] to [batch, heads, length, width]."""
        return self.graph.op("Transpose", x, perm=[0, 2, 1, 3])

    def merge_heads(self, x: str) -> str:
        """Merge heads: [batch, heads, length, width] becomes [batch, length, heads * width]."""
        return self.graph.op("Reshape", self.graph.op("Transpose", x, perm=[0, 2, 1, 3]), self.graph.ints(0, 0, -1))


def array_of(tensor: torch.Tensor, dtype: np.dtype, key: str) -> np.ndarray:
    """Convert `tensor` to a numpy array of `dtype`; ExportError for NaN or infinity (fp16: above 65504)."""
    cast = tensor.to(torch.float16 if dtype == np.float16 else torch.float32).contiguous()
    check_finite(key, tensor, cast, others="fp32")
    return cast.numpy()


def silu(graph: Graph, x: str) -> str:
    """Add the SiLU activation, x * sigmoid(x)."""
    return graph.op("Mul", x, graph.op("Sigmoid", x))


def token_positions(graph: Graph) -> str:
    """Add the positions 0, 1, ... of the tokens in a row of input_ids, int64 [length]."""
    length = graph.op("Squeeze", graph.op("Shape", "input_ids", start=1, end=2), graph.ints(0))
    return graph.op("Range", graph.scalar(0, np.int64), length, graph.scalar(1, np.int64))


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: cosines and sines of all positions, [batch, 1, length, width / 2] in the graph's dtype.

    Two dimensions rotate together: (i, i + width / 2), or neighbours (2i, 2i + 1). With `pairs_in` they are neighbours
    in the input, with `pairs_out` in the result.
    """

    graph: Graph
    cos: str
    sin: str
    width: int
    pairs_in: bool = False
    pairs_out: bool = False

    @classmethod
    def of(cls, graph: Graph, positions: str, frequencies: np.ndarray, scaling: float = 1.0, **pairs: bool) -> "Rotary":
        """Make the rotary embedding of `positions`, int64 [rows, 1, length, 1], from transformers' frequencies."""
        angles = graph.op("Mul", graph.cast(positions, np.float32), graph.constant(frequencies))
        tables = [graph.op(kind, angles) for kind in ("Cos", "Sin")]
        if scaling != 1:
            tables = [graph.op("Mul", table, graph.scalar(scaling, np.float32)) for table in tables]
        cos, sin = (graph.cast(table, graph.dtype) if graph.is_half() else table for table in tables)
        return cls(graph, cos, sin, 2 * len(frequencies), **pairs)

    def rotate(self, x: str) -> str:
        """Rotate x [batch, heads, length, width] by the angles of its positions."""
        graph = self.graph
        if self.pairs_in:
            end, axis, step = graph.ints(self.width), graph.ints(3), graph.ints(2)
            first, second = (graph.op("Slice", x, graph.ints(begin), end, axis, step) for begin in (0, 1))
        else:
            first, second = graph.ops("Split", x, names=2, axis=-1, num_outputs=2)
        halves = [
            graph.op("Sub", graph.op("Mul", first, self.cos), graph.op("Mul", second, self.sin)),
            graph.op("Add", graph.op("Mul", second, self.cos), graph.op("Mul", first, self.sin)),
        ]
        if not self.pairs_out:
            return graph.op("Concat", *halves, axis=-1)
        stacked = graph.op("Concat", *(graph.op("Unsqueeze", half, graph.ints(-1)) for half in halves), axis=-1)
        return graph.op("Reshape", stacked, graph.ints(0, 0, 0, self.width))

    def rotate_first(self, x: str, width: int) -> str:
        """Rotate the first `self.width` of the `width` dimensions of x [batch, heads, length, width]."""
        if width == self.width:
            return self.rotate(x)
        graph = self.graph
        rotated, rest = graph.ops("Split", x, graph.ints(self.width, width - self.width), names=2, axis=-1)
        return graph.op("Concat", self.rotate(rotated), rest, axis=-1)


@dataclass(frozen=True)
class Mask:
    """Attention mask: `allowed` [batch, 1, length, total], and the number of keys `total` as a vector of size one."""

    graph: Graph
    allowed: str
    total: str

    def attend(self, query: str, key: str, value: str, *, heads: int, key_heads: int) -> str:
        """Add attention with a scaled `query` [batch, heads, length, d]; returns [batch, heads, length, e].

        `key` is [batch, key_heads, total, d], `value` [batch, key_heads, total, e]. Query heads that share a key are
        rows of one matrix product, so keys are not repeated. Softmax is computed in fp32. A fully masked row, which is
        padding, gets the mean of all values instead of NaN.
        """
        graph = self.graph
        grouped = graph.op("Reshape", query, graph.ints(0, key_heads, -1, 0)) if heads != key_heads else query
        scores = graph.op("MatMul", grouped, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = graph.cast(scores, np.float32) if graph.is_half() else scores
        scores = graph.op("Reshape", scores, self._shape(heads)) if heads != key_heads else scores
        masked = graph.op("Where", self.allowed, scores, graph.scalar(float(np.finfo(np.float32).min), np.float32))
        weights = graph.op("Softmax", masked, axis=-1)
        weights = graph.cast(weights, graph.dtype) if graph.is_half() else weights
        weights = graph.op("Reshape", weights, self._shape(key_heads)) if heads != key_heads else weights
        mixed = graph.op("MatMul", weights, value)
        return self.graph.op("Reshape", mixed, self.graph.ints(0, heads, -1, 0)) if heads != key_heads else mixed

    def _shape(self, heads: int) -> str:
        return self.graph.op("Concat", self.graph.ints(0, heads, -1), self.total, axis=0)
