"""Layers of decoders, added to an ONNX graph from transformers' own modules and a folder's tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ExportError
from ds_finetune.export.formats import ONNX
from ds_finetune.export.onnx.graph import Graph
from ds_finetune.families.family import Family, OnnxGraph
from ds_finetune.families.table import family_of
from ds_finetune.model.weights.names import published_name

Read = Callable[[str], torch.Tensor]
"""Reads the tensor of a published name, as a whole, on the CPU."""
_LAST = -1


def parts_of(config: PretrainedConfig) -> OnnxGraph:
    """The `OnnxGraph` of this model's family; ExportError where it has none."""
    parts = ONNX.check_model_type(config.model_type).onnx
    assert parts is not None
    return parts


@dataclass(frozen=True)
class Layers:
    """Adds modules of `model`, which may be on the meta device, to `graph`.

    Sizes and constants are those of the modules.
    """

    graph: Graph
    model: PreTrainedModel
    read: Read

    @property
    def family(self) -> Family:
        """The model's row of the table."""
        return family_of(self.model.config.model_type)

    def module(self, name: str) -> Any:  # noqa: ANN401 - each class of transformers has attributes of its own
        """The module `name` of the model."""
        return self.model.get_submodule(name)

    def linear(self, x: str, name: str) -> str:
        """The Linear `name` of x [..., in]: [..., out].

        The weight is stored as [in, out], as MatMul and tools that quantise it expect.
        """
        module = self.module(name)
        rows, columns = module.weight.shape
        key = f"{name}.weight"
        y = self.graph.op(
            "MatMul", x, self.graph.weight(f"{key}_transposed", (columns, rows), lambda: self.arrays(key, torch.t))
        )
        return (
            y if module.bias is None else self.graph.op("Add", y, self.weight(f"{name}.bias", tuple(module.bias.shape)))
        )

    def weight(
        self, key: str, shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
    ) -> str:
        """The tensor `key` after `change`, which makes it `shape`, in the graph's dtype."""
        return self.graph.weight(key, shape, lambda: self.arrays(key, change))

    def fp32(
        self, key: str, shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
    ) -> str:
        """As `weight`, but in fp32 whatever the graph's dtype, as transformers computes routers."""
        return self.graph.weight(
            key,
            shape,
            lambda: iter((array_of(change(self._tensor(key)), np.dtype(np.float32), key),)),
            dtype=np.dtype(np.float32),
        )

    def norm(self, x: str, name: str) -> str:
        """RMSNorm over the last dimension, in fp32 as transformers does; the epsilon is the module's own."""
        graph, module = self.graph, self.module(name)
        wide = graph.cast(x, np.float32) if graph.is_half() else x
        square = graph.op("Pow", wide, graph.scalar(2, np.float32))
        mean = graph.op("ReduceMean", square, graph.ints(_LAST), keepdims=1)
        root = graph.op("Sqrt", graph.op("Add", mean, graph.scalar(module.variance_epsilon, np.float32)))
        scaled = graph.op("Div", wide, root)
        narrow = graph.cast(scaled, graph.dtype) if graph.is_half() else scaled
        return graph.op("Mul", narrow, self.weight(f"{name}.weight", tuple(module.weight.shape)))

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

    def arrays(self, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[np.ndarray]:
        """The tensor `key` after `change` in the graph's dtype, as one array."""
        yield array_of(change(self._tensor(key)), self.graph.dtype, key)

    def _tensor(self, name: str) -> torch.Tensor:
        """The model's tensor `name`, which is no tensor of fused experts."""
        return self.read(published_name(name, self.family))


def array_of(tensor: torch.Tensor, dtype: np.dtype, key: str) -> np.ndarray:
    """`tensor` in row-major order as `dtype`; ExportError where that gives NaN or infinity, as beyond fp16's 65504."""
    cast = tensor.to(torch.float16 if dtype == np.float16 else torch.float32).contiguous()
    low, high = torch.aminmax(cast)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        is_read = bool(torch.isfinite(tensor).all())
        raise ExportError(
            f"tensor `{key}` holds NaN or infinity {f'as {dtype}' if is_read else 'in the folder'}",
            hint="export with --dtype fp32" if is_read else "the weights are damaged; export them again",
        )
    return cast.numpy()


def silu(graph: Graph, x: str) -> str:
    """x * sigmoid(x)."""
    return graph.op("Mul", x, graph.op("Sigmoid", x))


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding: cosines and sines of every position [batch, 1, length, width / 2] in the graph's dtype.

    The dimensions of a rotated pair are (i, i + width / 2), or (2i, 2i + 1): in the input where `pairs_in`, in the
    result where `pairs_out`.
    """

    graph: Graph
    cos: str
    sin: str
    width: int
    pairs_in: bool
    pairs_out: bool

    def rotate(self, x: str) -> str:
        """x [batch, heads, length, width] with each pair rotated by the angle of its position."""
        graph = self.graph
        first, second = self._split(x)
        left = graph.op("Sub", graph.op("Mul", first, self.cos), graph.op("Mul", second, self.sin))
        right = graph.op("Add", graph.op("Mul", second, self.cos), graph.op("Mul", first, self.sin))
        if not self.pairs_out:
            return graph.op("Concat", left, right, axis=_LAST)
        stacked = graph.op(
            "Concat", *(graph.op("Unsqueeze", half, graph.ints(_LAST)) for half in (left, right)), axis=_LAST
        )
        return graph.op("Reshape", stacked, graph.ints(0, 0, 0, self.width))

    def rotate_first(self, x: str, width: int) -> str:
        """x [batch, heads, length, width] with its first dimensions rotated, as many as there are angles for, and the
        others as they are.
        """
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

        `key` is [batch, key_heads, total, d], `value` [..., e]. Heads that share a key are rows of one product, so that
        keys are never repeated. A row that may attend to nothing, which is padding, gets the mean of all values rather
        than NaN. Softmax is computed in fp32.
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
        return self._ungroup(mixed, heads) if heads != key_heads else mixed

    def _shape(self, heads: int) -> str:
        return self.graph.op("Concat", self.graph.ints(0, heads, -1), self.total, axis=0)

    def _ungroup(self, mixed: str, heads: int) -> str:
        return self.graph.op("Reshape", mixed, self.graph.ints(0, heads, -1, 0))
