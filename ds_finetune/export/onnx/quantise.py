"""Weights of linear layers in 8 or 4 bits by ONNX Runtime's own quantiser, and what they cost in loss."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from ds_finetune.config.units import GIB
from ds_finetune.errors import ExportError
from ds_finetune.export.onnx import DATA, MODEL
from ds_finetune.export.onnx.comparison import NEW_TOKENS, PROMPTS, Case, Floats, Ints, Reference
from ds_finetune.export.onnx.runtime import OnnxModel

BITS = {"int8": 8, "int4": 4}
"""Bits of a weight by the value of `--dtype`."""
_BLOCK = 32
"""Rows of a column with a scale and a zero point of their own."""
_ROWS, _LENGTH = 8, 64
"""Texts that the model samples, and their tokens."""


@dataclass(frozen=True)
class QuantisedWeights:
    """What quantising the weights of a graph has changed."""

    dtype: str
    loss_before: float
    """Mean negative log-likelihood of a token of texts that the model sampled itself, in nats."""
    loss_after: float
    divergence: float
    """Mean Kullback-Leibler divergence of a token's distribution from that in fp32, in nats."""
    bytes_before: int
    bytes_after: int

    def line(self) -> str:
        """The result, for the terminal."""
        return (
            f"{self.dtype}: loss {self.loss_before:.4f} before and {self.loss_after:.4f} after, KL divergence "
            f"{self.divergence:.1e} nats a token, on {_ROWS * (_LENGTH - 1)} tokens that the model sampled; "
            f"{self.bytes_before / GIB:.2f} GiB became {self.bytes_after / GIB:.2f} GiB"
        )


def quantise_weights(folder: Path, dtype: str, vocab: int, *, inline_bytes: int) -> QuantisedWeights:
    """Replace the graph in `folder` by one whose linear layers have weights in `dtype`, with blocks of 32.

    Embeddings and the weights of routed experts stay as they are: they are not constants of a MatMul. ExportError where
    there is no other weight.
    """
    ids = _sampled(OnnxModel(folder), vocab)
    before, size = _log_probabilities(OnnxModel(folder), ids), _size(folder)
    _quantise(folder, BITS[dtype], inline_bytes)
    after = _log_probabilities(OnnxModel(folder), ids)
    first, last = (
        float(-np.take_along_axis(each, ids[:, 1:, None], -1).mean(dtype=np.float64)) for each in (before, after)
    )
    divergence = float((np.exp(before) * (before - after)).sum(-1).mean(dtype=np.float64))
    return QuantisedWeights(dtype, first, last, divergence, size, _size(folder))


def own_reference(folder: Path, reference: Reference) -> Reference:
    """`reference` with what the graph in `folder` computes itself, so that a later check finds what has changed."""
    assert reference.tokens is not None
    model = OnnxModel(folder)
    cases = tuple(_with_own_logits(case, model) for case in reference.cases)
    pads, length = PROMPTS
    ids, leads = reference.tokens[:, :length], []
    for _ in range(NEW_TOKENS):
        mask = np.array([[0] * count + [1] * (ids.shape[1] - count) for count in pads], dtype=np.int64)
        logits = model.logits(ids, mask, (ids.shape[1],))[:, -1].astype(np.float32)
        best = np.sort(logits, axis=-1)
        leads.append((best[:, -1] - best[:, -2]) / np.abs(logits).max(-1))
        ids = np.concatenate([ids, logits.argmax(-1)[:, None]], axis=1)
    return replace(reference, cases=cases, tokens=ids, leads=np.stack(leads, axis=1))


def _with_own_logits(case: Case, model: OnnxModel) -> Case:
    logits = model.logits(case.ids, case.mask, (case.ids.shape[1],))[case.mask.astype(bool)].astype(np.float32)
    return replace(case, logits=logits, largest=float(np.abs(logits).max()))


def _quantise(folder: Path, bits: int, inline_bytes: int) -> None:
    # It sets up the root logger when it is imported.
    level, handlers = logging.root.level, [*logging.root.handlers]
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    logging.getLogger(MatMulNBitsQuantizer.__module__).setLevel(logging.ERROR)
    quantizer = MatMulNBitsQuantizer(onnx.load(folder / MODEL), bits=bits, block_size=_BLOCK, is_symmetric=False)
    quantizer.process()
    model: onnx.ModelProto = quantizer.model.model
    if not any(node.op_type == "MatMulNBits" for node in model.graph.node):
        raise ExportError(
            f"no linear layer of the graph can have a weight of {bits} bits", hint="export with --dtype fp32"
        )
    (folder / DATA).unlink(missing_ok=True)
    is_external = model.ByteSize() > inline_bytes
    onnx.save_model(model, folder / MODEL, save_as_external_data=is_external, location=Path(DATA).name)


def _sampled(model: OnnxModel, vocab: int) -> Ints:
    """Texts of tokens [rows, length] that the model samples at temperature 1 after a token each, always the same."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab, size=(_ROWS, 1), dtype=np.int64)
    cache = model.empty_cache(_ROWS)
    for _ in range(_LENGTH - 1):
        fed = ids[:, -1:] if model.has_cache else ids
        logits, cache = model.run(fed, np.ones_like(ids), cache)
        # Adding noise of Gumbel's distribution and taking the largest is sampling.
        chosen = (logits[:, -1].astype(np.float64) + rng.gumbel(size=logits[:, -1].shape)).argmax(-1)
        ids = np.concatenate([ids, chosen[:, None]], axis=1)
    return ids


def _log_probabilities(model: OnnxModel, ids: Ints) -> Floats:
    """Log-probabilities of every next token, fp32 [rows, length - 1, vocabulary]."""
    logits = model.logits(ids, np.ones_like(ids), (ids.shape[1],))[:, :-1].astype(np.float32)
    shifted = logits - logits.max(-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / MODEL).parent.iterdir())
