"""Builds an ONNX graph node by node, and writes it to a file. Weights are streamed in chunks."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from ds_finetune.export.onnx import DATA, MODEL

OPSET, IR_VERSION = 18, 8
"""Versions of ONNX's operator set and file format. ONNX Runtime supports opset 18 on every device since 1.14."""
_ALIGNMENT = 4096
"""Alignment of weights in the data file in bytes: one memory page, so that programs can map them."""

Pieces = Callable[[], Iterator[np.ndarray]]
GraphEnds = tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]
"""The inputs and the outputs of an ONNX graph."""
BATCH, LENGTH = "batch_size", "sequence_length"
"""Names of the variable sizes of an ONNX graph: number of rows, and tokens per row."""


@dataclass(frozen=True)
class Weight:
    """A weight of an ONNX graph. `pieces` yields its elements in row-major order, as arrays of `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Pieces

    @property
    def num_bytes(self) -> int:
        """Size of the weight in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Graph:
    """An ONNX graph under construction: its nodes in order, and the constants and weights that they use."""

    dtype: np.dtype
    """Dtype of the graph's weights and activations: float32 or float16."""
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    numbers: "count[int]" = field(default_factory=count)

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:  # noqa: ANN401 - what ONNX has as attributes
        """Add a node with one output. Returns the output's name, which is `name` if given."""
        return self.ops(kind, *inputs, names=(name or self.new_name(kind),), **attributes)[0]

    def ops(self, kind: str, *inputs: str, names: Sequence[str] | int, **attributes: Any) -> list[str]:  # noqa: ANN401
        """Add a node with several outputs, given by names or by number. Returns the names of the outputs."""
        outputs = [self.new_name(kind) for _ in range(names)] if isinstance(names, int) else list(names)
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=f"{kind}_{next(self.numbers)}", **attributes))
        return outputs

    def ints(self, *values: int) -> str:
        """Add a constant int64 vector to the graph, and return its name."""
        return self.constant(np.array(values, dtype=np.int64))

    def scalar(self, value: float, dtype: np.dtype | type | None = None) -> str:
        """Add a constant scalar of the graph's dtype, or of `dtype`, and return its name."""
        return self.constant(np.array(value, dtype=dtype or self.dtype))

    def constant(self, values: np.ndarray) -> str:
        """Add a small constant to the graph, and return its name. Equal constants are stored once."""
        name = f"const_{values.dtype}_{values.shape}_{values.tobytes().hex()}"
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(values, f"const_{len(self.constants)}")
        return self.constants[name].name

    def weight(self, name: str, shape: tuple[int, ...], pieces: Pieces, dtype: np.dtype | None = None) -> str:
        """Add a weight of `dtype`, by default the graph's. `pieces` yields its values when the file is written."""
        assert name not in self.weights, name
        self.weights[name] = Weight(name, shape, dtype or self.dtype, pieces)
        return name

    def cast(self, value: str, dtype: np.dtype | type) -> str:
        """Add a node that casts `value` to `dtype`."""
        return self.op("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def is_half(self) -> bool:
        """Whether the graph's activations are float16; layers then cast sums to fp32."""
        return bool(self.dtype == np.float16)

    def new_name(self, kind: str) -> str:
        """Make a name that no other value of the graph has."""
        return f"{kind.lower()}_{next(self.numbers)}_out"


def write_model(graph: Graph, ends: GraphEnds, folder: Path, *, inline_bytes: int) -> None:
    """Write `graph` with its inputs and outputs `ends` to the file MODEL of `folder`. If the weights have more than
    `inline_bytes` in total, they are streamed to the file DATA, because a protobuf message must be smaller than 2 GiB.
    """
    (folder / MODEL).parent.mkdir(parents=True, exist_ok=True)
    is_external = sum(weight.num_bytes for weight in graph.weights.values()) > inline_bytes
    weights = list(graph.weights.values())
    stored = _write_data(weights, folder / DATA) if is_external else [_inline(weight) for weight in weights]
    proto = helper.make_graph(graph.nodes, "model", *ends, initializer=[*graph.constants.values(), *stored])
    domains = {"": OPSET} | {node.domain: 1 for node in graph.nodes if node.domain}
    model: ModelProto = helper.make_model(
        proto,
        opset_imports=[helper.make_opsetid(*domain) for domain in domains.items()],
        ir_version=IR_VERSION,
        producer_name="ds_finetune",
    )
    (folder / MODEL).write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(folder / MODEL), full_check=False)


def value(name: str, dtype: np.dtype | type, shape: Sequence[int | str | None]) -> onnx.ValueInfoProto:
    """Declare an input or output of an ONNX graph. Each dimension is a size, the name of a variable size, or None."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def _proto(weight: Weight) -> TensorProto:
    return TensorProto(name=weight.name, dims=weight.shape, data_type=helper.np_dtype_to_tensor_dtype(weight.dtype))


def _inline(weight: Weight) -> TensorProto:
    proto = _proto(weight)
    proto.raw_data = b"".join(piece.tobytes() for piece in weight.pieces())
    assert len(proto.raw_data) == weight.num_bytes, weight.name
    return proto


def _write_data(weights: Sequence[Weight], path: Path) -> list[TensorProto]:
    protos = []
    with path.open("wb") as file:
        for weight in weights:
            begin = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
            file.seek(begin)
            for piece in weight.pieces():
                file.write(np.ascontiguousarray(piece).data)
            assert file.tell() - begin == weight.num_bytes, weight.name
            proto = _proto(weight)
            proto.raw_data = b""
            set_external_data(proto, path.name, begin, weight.num_bytes)
            protos.append(proto)
    return protos
