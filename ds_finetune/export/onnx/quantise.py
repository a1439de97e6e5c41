"""Quantises linear weights of an ONNX graph to 8 or 4 bits by ONNX Runtime, and measures the lost accuracy."""

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from ds_finetune.errors import ExportError
from ds_finetune.export.onnx import DATA, MODEL
from ds_finetune.export.onnx.comparison import Reference, generate_tokens, leads_of, with_logits
from ds_finetune.export.onnx.graph import Graph, Weight, write_model
from ds_finetune.export.onnx.runtime import OnnxCausalLM, OnnxModel
from ds_finetune.export.quantisation_loss import QuantisationLoss, quantisation_loss
from ds_finetune.export.shards import PIECE_NUMEL

BITS = {"int8": 8, "int4": 4}
_ROUTER = ".gate.weight"
_BLOCK = 32
"""Number of consecutive weights in a column that share a scale and a zero point."""


def quantise_weights(folder: Path, dtype: str, source: Path, *, inline_bytes: int) -> QuantisationLoss:
    """Quantise the linear weights of the graph in `folder` to the bits of `dtype`. `source` is the exported model.
    Embeddings and routed experts are not quantised, because their weights are not constants of a MatMul. ExportError if
    no weight can be quantised.
    """
    new = _quantise(folder, BITS[dtype], inline_bytes)
    before = OnnxCausalLM.from_pretrained(folder, is_mapped=True)
    after = OnnxCausalLM(before.config, OnnxModel(new, is_mapped=True))
    loss = quantisation_loss(dtype, source, before, after, (_size(folder), _size(new)))
    shutil.rmtree((folder / MODEL).parent)
    (new / MODEL).parent.rename((folder / MODEL).parent)
    new.rmdir()
    return loss


def own_reference(folder: Path, reference: Reference) -> Reference:
    """Replace the logits of `reference` by those of the quantised graph in `folder`, so that a later verification
    detects changed files. Two test inputs remain: more take too long, because each use unpacks the 8-bit weights.
    """
    assert reference.tokens is not None
    model = OnnxCausalLM.from_pretrained(folder, is_mapped=True)
    cases = tuple(with_logits(case, model) for case in reference.cases[2::2])
    _, logits = generate_tokens(model, reference.tokens)
    leads, chosen = leads_of(logits), logits.argmax(dim=-1).numpy()
    return replace(reference, cases=cases, leads=leads, chosen=chosen, program="itself when it was exported")


def _quantise(folder: Path, bits: int, inline_bytes: int) -> Path:
    """Write the graph of `folder` with quantised constant matrices to a new subfolder, in chunks of bounded size.
    Routers are not quantised, because a token's experts depend on small differences.
    """
    model, quantizer = onnx.load(folder / MODEL, load_external_data=False), _quantizer(bits)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    # The matrices of linear layers are 2-D; the weights of latent attention are 3-D and stay unquantised.
    linear = {name for name, tensor in stored.items() if len(tensor.dims) == 2 and not name.endswith(_ROUTER)}
    chosen = {
        node.output[0]: node.input[1]
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in linear
    }
    if not chosen:
        raise ExportError(
            f"the graph has no linear layer whose weight can be quantised to {bits} bits",
            hint="export with --dtype fp32",
        )
    matrices = {name: _Matrix(partial(_values, stored[name], folder / DATA), quantizer) for name in chosen.values()}
    others = {name: tensor for name, tensor in stored.items() if name not in matrices}
    constants = {name: tensor for name, tensor in others.items() if not tensor.external_data}
    weights = [weight for name, matrix in matrices.items() for weight in matrix.weights(name)]
    weights += [_unchanged(folder, tensor) for name, tensor in others.items() if name not in constants]
    nodes = [
        matrices[chosen[node.output[0]]].node(node) if node.output[0] in chosen else node for node in model.graph.node
    ]
    graph = Graph(np.dtype(np.float32), nodes, constants, {weight.name: weight for weight in weights})
    new = folder / "quantised"
    write_model(graph, ([*model.graph.input], [*model.graph.output]), new, inline_bytes=inline_bytes)
    return new


def _quantizer(bits: int) -> Any:  # noqa: ANN401 - the library has no types
    # Importing the library configures Python's root logger, which is restored below.
    level, handlers = logging.root.level, [*logging.root.handlers]
    from onnxruntime.quantization import matmul_nbits_quantizer as library

    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    config = library.DefaultWeightOnlyQuantConfig(block_size=_BLOCK, is_symmetric=False, bits=bits)
    return library.DefaultWeightOnlyQuantizer(config)


@dataclass
class _Matrix:
    """Constant matrix [inputs, outputs] of a MatMul, which ONNX Runtime's `quantizer` quantises in column chunks."""

    read: Callable[[], np.ndarray]
    quantizer: Any
    rest: tuple[list[np.ndarray], list[np.ndarray]] = field(default_factory=lambda: ([], []))
    """Scales and zero points of the columns that have been quantised so far."""
    names: list[str] = field(default_factory=list)

    def weights(self, name: str) -> list[Weight]:
        """The three weights that replace the matrix, in file order: quantised numbers, scales and zero points."""
        (rows, columns), bits = self.read().shape, self.quantizer.config.bits
        blocks, kind = -(-rows // _BLOCK), np.dtype(np.uint8)
        self.names = [f"{name}_Q{bits}", f"{name}_scales", f"{name}_zero_points"]
        return [
            Weight(self.names[0], (columns, blocks, _BLOCK * bits // 8), kind, self._numbers),
            Weight(self.names[1], (columns, blocks), np.dtype(np.float32), lambda: iter(self.rest[0])),
            Weight(self.names[2], (columns, -(-blocks * bits // 8)), kind, lambda: iter(self.rest[1])),
        ]

    def _numbers(self) -> Iterator[np.ndarray]:
        rows, columns = self.read().shape
        step = max(PIECE_NUMEL // rows, 1)
        for first in range(0, columns, step):
            part = np.ascontiguousarray(self.read()[:, first : first + step])
            packed, *rest = self.quantizer.qbits_block_quant(part)
            for collected, each in zip(self.rest, rest, strict=True):
                collected.append(each)
            yield packed

    def node(self, node: onnx.NodeProto) -> onnx.NodeProto:
        (rows, columns), bits = self.read().shape, self.quantizer.config.bits
        settings = {"K": rows, "N": columns, "bits": bits, "block_size": _BLOCK, "domain": "com.microsoft"}
        inputs = [node.input[0], *self.names]
        return onnx.helper.make_node("MatMulNBits", inputs, node.output, name=node.name, **settings)


def _values(tensor: onnx.TensorProto, file: Path) -> np.ndarray:
    """Values of a weight in an ONNX file. Each call maps the file again, so that values do not stay in memory."""
    if not tensor.external_data:
        return numpy_helper.to_array(tensor)
    begin = int({entry.key: entry.value for entry in tensor.external_data}["offset"])
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(file, dtype, mode="r", offset=begin, shape=tuple(tensor.dims))


def _unchanged(folder: Path, tensor: onnx.TensorProto) -> Weight:
    read = partial(_values, tensor, folder / DATA)

    def pieces() -> Iterator[np.ndarray]:
        for first in range(0, max(math.prod(tensor.dims), 1), PIECE_NUMEL):
            yield np.array(read().reshape(-1)[first : first + PIECE_NUMEL])

    return Weight(tensor.name, tuple(tensor.dims), read().dtype, pieces)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / MODEL).parent.iterdir())
