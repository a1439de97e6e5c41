"""Decoder layers, added to an ONNX graph from transformers' modules and a folder's tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.export.formats import ONNX
from ds_finetune.export.onnx.graph import Graph
from ds_finetune.export.source import check_finite
from ds_finetune.families.family import Family, OnnxGraph
from ds_finetune.families.table import family_of
from ds_finetune.model.weights.names import published_name

Read = Callable[[str], torch.Tensor]
"""Reads the full tensor with a published name, on the CPU."""
_LAST = -1
_PIECE_NUMEL = 2**22
"""Elements of a weight that are cast and written at a time."""


def parts_of(config: PretrainedConfig) -> OnnxGraph:
    """The `OnnxGraph` of the model's family; ExportError where the family has none."""
    parts = ONNX.check_model_type(config.model_type).onnx
    assert parts is not None
    return parts


@dataclass(frozen=True)
class Layers:
    """Adds modules of `model`, which may be on the meta device, to `graph`.

    Sizes and constants are taken from the modules.
    """

    graph: Graph
    model: PreTrainedModel
    read: Read

    @property
    def family(self) -> Family:
        """The row of the model's family."""
        return family_of(self.model.config.model_type)

    def module(self, name: str) -> Any:  # noqa: ANN401 - each class of transformers has attributes of its own
        """The module `name` of the model."""
        return self.model.get_submodule(name)

    def linear(self, x: str, name: str) -> str:
        """The Linear `name` of x [..., in]: [..., out].

        The weight is stored as [in, out], which MatMul and quantisation tools expect.
        """
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
        """The model's tensor `key` after `change`, as the weight `name` of the graph (by default `key`).

        It has the graph's dtype unless another is given, e.g. fp32 for routers as in transformers. Not for fused
        experts.
        """
        module, _, leaf = key.rpartition(".")
        shape, stored = tuple(change(getattr(self.module(module), leaf)).shape), published_name(key, self.family)

        def pieces() -> Iterator[np.ndarray]:
            # Cast a bounded part at a time: embedding and head are the largest tensors of small models.
            changed = change(self.read(stored))
            for part in changed.split(max(_PIECE_NUMEL * len(changed) // changed.numel(), 1)):
                yield array_of(part, dtype or self.graph.dtype, key)

        return self.graph.weight(name or key, shape, pieces, dtype)

    def norm(self, x: str, name: str) -> str:
        """RMSNorm over the last dimension in fp32, as in transformers, with the module's epsilon."""
        graph, module = self.graph, self.module(name)
        wide = graph.cast(x, np.float32) if graph.is_half() else x
        square = graph.op("Pow", wide, graph.scalar(2, np.float32))
        mean = graph.op("ReduceMean", square, graph.ints(_LAST), keepdims=1)
        root = graph.op("Sqrt", graph.op("Add", mean, graph.scalar(module.variance_epsilon, np.float32)))
        scaled = graph.op("Div", wide, root)
        narrow = graph.cast(scaled, graph.dtype) if graph.is_half() else scaled
        return graph.op("Mul", narrow, self.weight(f"{name}.weight"))

    def mlp(self, x: str, name: str) -> str:
        """down(silu(gate(x)) * up(x))."""
        gated = self.graph.op(
            "Mul", silu(self.graph, self.linear(x, f"{name}.gate_proj")), self.linear(x, f"{name}.up_proj")
        )
        return self.linear(gated, f"{name}.down_proj")

    def heads(self, x: str, count: int, width: int) -> str:
        """[batch, length, count * width] as [batch, length, count, width]."""
        return self.graph.op("Reshape", x, self.graph.ints(0, 0, count, width))

    def heads_first(self, x: str) -> str:
        """[batch, length, heads, width] as [batch, heads, length, width]."""
        return self.graph.op("Transpose", x, perm=[0, 2, 1, 3])

    def merge_heads(self, x: str) -> str:
        """[batch, heads, length, width] as [batch, length, heads * width]."""
        return self.graph.op("Reshape", self.graph.op("Transpose", x, perm=[0, 2, 1, 3]), self.graph.ints(0, 0, -1))


def array_of(tensor: torch.Tensor, dtype: np.dtype, key: str) -> np.ndarray:
    """`tensor` in row-major order as `dtype`; ExportError where the cast gives NaN or infinity (fp16: above 65504)."""
    cast = tensor.to(torch.float16 if dtype == np.float16 else torch.float32).contiguous()
    check_finite(key, tensor, cast, others="fp32")
    return cast.numpy()


def silu(graph: Graph, x: str) -> str:
    """x * sigmoid(x)."""
    return graph.op("Mul", x, graph.op("Sigmoid", x))


def token_positions(graph: Graph) -> str:
    """Position 0, 1, ... of each token in a row of input_ids, int64 [length]."""
    length = graph.op("Squeeze", graph.op("Shape", "input_ids", start=1, end=2), graph.ints(0))
    return graph.op("Range", graph.scalar(0, np.int64), length, graph.scalar(1, np.int64))


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: cosines and sines of every position [batch, 1, length, width / 2] in the graph's dtype.

    A rotated pair is dimensions (i, i + width / 2), or (2i, 2i + 1) in the input if `pairs_in` and in the result if
    `pairs_out`.
    """

    graph: Graph
    cos: str
    sin: str
    width: int
    pairs_in: bool = False
    pairs_out: bool = False

    @classmethod
    def of(cls, graph: Graph, positions: str, frequencies: np.ndarray, scaling: float = 1.0, **pairs: bool) -> "Rotary":
        """The embedding of `positions` int64 [rows, 1, length, 1]; fp32, with transformers' frequencies and scaling."""
        angles = graph.op("Mul", graph.cast(positions, np.float32), graph.constant(frequencies))
        tables = [graph.op(kind, angles) for kind in ("Cos", "Sin")]
        if scaling != 1:
            tables = [graph.op("Mul", table, graph.scalar(scaling, np.float32)) for table in tables]
        cos, sin = (graph.cast(table, graph.dtype) if graph.is_half() else table for table in tables)
        return cls(graph, cos, sin, 2 * len(frequencies), **pairs)

    def rotate(self, x: str) -> str:
        """x [batch, heads, length, width] with each pair rotated by the angle of its position."""
        graph = self.graph
        first, second = self._split(x)
        halves = [
            graph.op("Sub", graph.op("Mul", first, self.cos), graph.op("Mul", second, self.sin)),
            graph.op("Add", graph.op("Mul", second, self.cos), graph.op("Mul", first, self.sin)),
        ]
        if not self.pairs_out:
            return graph.op("Concat", *halves, axis=_LAST)
        stacked = graph.op("Concat", *(graph.op("Unsqueeze", half, graph.ints(_LAST)) for half in halves), axis=_LAST)
        return graph.op("Reshape", stacked, graph.ints(0, 0, 0, self.width))

    def rotate_first(self, x: str, width: int) -> str:
        """x [batch, heads, length, width] with the first `self.width` dimensions rotated, and the others unchanged."""
        if width == self.width:
            return self.rotate(x)
        graph = self.graph
        rotated, rest = graph.ops("Split", x, graph.ints(self.width, width - self.width), names=2, axis=_LAST)
        return graph.op("Concat", self.rotate(rotated), rest, axis=_LAST)

    def _split(self, x: str) -> list[str]:
        graph = self.graph
        if not self.pairs_in:
            return graph.ops("Split", x, names=2, axis=_LAST, num_outputs=2)
        end, axis, step = graph.ints(self.width), graph.ints(3), graph.ints(2)
        return [graph.op("Slice", x, graph.ints(begin), end, axis, step) for begin in (0, 1)]


@dataclass(frozen=True)
class Mask:
    """The attention mask: `allowed` [batch, 1, length, total], and the number of keys `total` [1]."""

    graph: Graph
    allowed: str
    total: str

    def attend(self, query: str, key: str, value: str, *, heads: int, key_heads: int) -> str:
        """Attention [batch, heads, length, e] of a scaled query [batch, heads, length, d].

        `key` is [batch, key_heads, total, d], `value` [..., e]. Query heads that share a key are rows of one matrix
        product, so keys are never repeated. A fully masked row, which is padding, gets the mean of all values instead
        of NaN. Softmax is computed in fp32.
        """
        graph = self.graph
        grouped = graph.op("Reshape", query, graph.ints(0, key_heads, -1, 0)) if heads != key_heads else query
        scores = graph.op("MatMul", grouped, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = graph.cast(scores, np.float32) if graph.is_half() else scores
        scores = graph.op("Reshape", scores, self._shape(heads)) if heads != key_heads else scores
        masked = graph.op("Where", self.allowed, scores, graph.scalar(float(np.finfo(np.float32).min), np.float32))
        weights = graph.op("Softmax", masked, axis=_LAST)
        weights = graph.cast(weights, graph.dtype) if graph.is_half() else weights
        weights = graph.op("Reshape", weights, self._shape(key_heads)) if heads != key_heads else weights
        mixed = graph.op("MatMul", weights, value)
        return self.graph.op("Reshape", mixed, self.graph.ints(0, heads, -1, 0)) if heads != key_heads else mixed

    def _shape(self, heads: int) -> str:
        return self.graph.op("Concat", self.graph.ints(0, heads, -1), self.total, axis=0)
