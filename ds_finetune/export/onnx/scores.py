"""ONNX graphs of classifiers, compared with plain transformers: batch sizes, lengths, padding on either side."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig

from ds_finetune.export.onnx.comparison import (
    FLIPPED_SHARE,
    TOLERANCES,
    OnnxComparison,
    describe_experts,
    record_experts,
)
from ds_finetune.export.onnx.runtime import open_session
from ds_finetune.families.table import family_of
from ds_finetune.foreign.auto_models import AutoModelForSequenceClassification

Ints = NDArray[np.int64]
SHAPES = (
    ((0,), 1, "right"),
    ((0,), 23, "right"),
    ((0, 3, 8), 9, "right"),
    ((0, 11, 5), 33, "right"),
    ((2, 0), 12, "left"),
)
"""Batches: padding tokens of each row, tokens of a row with padding, and the side of the padding."""


@dataclass(frozen=True)
class TextBatch:
    """Rows of random tokens with a mask, and types of tokens 0 and 1, int64 [rows, tokens] each."""

    name: str
    ids: Ints
    mask: Ints
    types: Ints

    def inputs(self, names: list[str]) -> dict[str, Ints]:
        """The inputs of a model that has inputs of these names."""
        known = {"input_ids": self.ids, "attention_mask": self.mask, "token_type_ids": self.types}
        return {name: known[name] for name in names}


@dataclass(frozen=True)
class ScoreReference:
    """What plain transformers computes in fp32."""

    batches: tuple[TextBatch, ...]
    logits: tuple[NDArray[np.float32], ...]
    """[rows, labels] of each batch."""
    experts: str
    """How many of the routed experts the tokens reach, for messages."""

    def as_tree(self) -> dict[str, Any]:
        """Plain values for a record."""
        batches = [
            {"name": batch.name, **{key: getattr(batch, key).tolist() for key in ("ids", "mask", "types")}}
            | {"logits": base64.b64encode(logits.astype("<f4").tobytes()).decode(), "labels": logits.shape[1]}
            for batch, logits in zip(self.batches, self.logits, strict=True)
        ]
        return {"texts": batches, "experts": self.experts}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Self:
        """From the values of `as_tree`."""
        batches, logits = [], []
        for each in tree["texts"]:
            parts = (np.array(each[key], dtype=np.int64) for key in ("ids", "mask", "types"))
            batches.append(TextBatch(each["name"], *parts))
            flat = np.frombuffer(base64.b64decode(each["logits"]), dtype="<f4")
            logits.append(flat.reshape(-1, each["labels"]))
        return cls(tuple(batches), tuple(logits), tree["experts"])


def make_score_reference(folder: Path) -> ScoreReference:
    """Run every batch through the classifier of `folder`, loaded with plain transformers in fp32 on the CPU."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    # An encoder scores the first token, which must not be padding.
    is_encoder = family_of(model.config.model_type).encoder is not None
    batches = tuple(_batch(model.config, *shape) for shape in SHAPES if not (is_encoder and shape[-1] == "left"))
    has_types = getattr(model.config, "type_vocab_size", 1) > 1
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if has_types else [])]
    with torch.no_grad(), record_experts(model.eval()) as reached:
        logits = tuple(
            model(**{name: torch.from_numpy(part) for name, part in batch.inputs(names).items()}).logits.numpy()
            for batch in batches
        )
    return ScoreReference(batches, logits, describe_experts(model, reached))


def _batch(config: PretrainedConfig, pads: tuple[int, ...], length: int, side: str) -> TextBatch:
    """Rows without the padding token, but for their padding, so that transformers finds the last token of each."""
    rng, pad = np.random.default_rng([len(pads), length]), config.pad_token_id
    if pad is None:
        pads = pads[:1]
    ids = rng.integers(0, config.vocab_size - 1, size=(len(pads), length), dtype=np.int64)
    ids += ids >= (config.vocab_size if pad is None else pad)
    mask = np.ones_like(ids)
    for row, count in enumerate(pads):
        mask[row, length - count :] = 0
    mask = mask if side == "right" else mask[:, ::-1].copy()
    types = (np.arange(length) >= length // 2) * mask
    filled = np.where(mask == 1, ids, 0 if pad is None else pad)
    return TextBatch(f"{len(pads)} texts of {length} tokens with {pads} pads on the {side}", filled, mask, types)


class OnnxScorer:
    """The model.onnx of a classifier's folder in ONNX Runtime, on all CPU cores of this process."""

    def __init__(self, folder: Path) -> None:
        self._session, self.dtype = open_session(folder)
        self.names = [entry.name for entry in self._session.get_inputs()]

    def logits(self, inputs: Mapping[str, Ints]) -> NDArray[np.float32]:
        """Logits [rows, labels] as fp32 of inputs int64 [rows, tokens]; others than the graph's are ignored."""
        (found,) = self._session.run(["logits"], {name: inputs[name] for name in self.names})
        return found.astype(np.float32)  # type: ignore[no-any-return]


def compare_scores(folder: Path, reference: ScoreReference) -> OnnxComparison:
    """Run folder/model.onnx on every batch of `reference` in ONNX Runtime on the CPU.

    Every text must be within the tolerance. With routed experts in fp16, a share of `FLIPPED_SHARE` may be beyond it.
    """
    model = OnnxScorer(folder)
    tolerance = TOLERANCES[model.dtype]
    allowed = FLIPPED_SHARE if reference.experts and model.dtype == np.float16 else 0.0
    distances = [
        np.abs(model.logits(batch.inputs(model.names)) - logits).max(axis=1) / np.abs(logits).max()
        for batch, logits in zip(reference.batches, reference.logits, strict=True)
    ]
    every = np.concatenate(distances)
    beyond = int((~(every <= tolerance)).sum())
    worst = int(np.argmax([np.nan_to_num(each, nan=np.inf).max() for each in distances]))
    failures = []
    if beyond > allowed * len(every) or not np.isfinite(every).all():
        failures.append(
            f"{beyond} of {len(every)} texts are beyond it, worst by {distances[worst].max():.2e} with "
            f"{reference.batches[worst].name}"
        )
    return OnnxComparison(
        len(every), beyond, float(every.max()), tolerance, allowed, None, reference.experts, tuple(failures)
    )
