"""Inputs and outputs of a forward of the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_finetune.model.attention.by_document import Documents
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import AnswerNumbers, Examples, TopLogProbs


class RealTokens(NamedTuple):
    """Which tokens of a forward belong to which document. A sequence parallel rank holds its own tokens."""

    document: torch.Tensor
    """Index of the document of each flattened token, int64 [tokens]. Padding has the index after the last document."""
    lengths: torch.Tensor
    """Number of tokens of each document, over all sequence parallel ranks, int64 [documents]."""

    @property
    def is_real(self) -> torch.Tensor:
        """Whether each token is not padding, bool [tokens]."""
        return self.document < len(self.lengths)


def find_real_tokens(
    real: Sequence[int], documents: Sequence[Sequence[int]] | None, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Document numbers of all tokens, int64 [rows, tokens], and lengths of the documents, int64 [documents]. The first
    `real` tokens of each row are not padding; without `documents` each row is one document.
    """
    numbers, lengths = np.full((len(real), tokens), -1, dtype=np.int64), list[int]()
    for row, (parts, end) in enumerate(zip(documents or [(tokens,)] * len(real), real, strict=True)):
        start = 0
        for part in parts:
            inside = min(part, end - start)
            if inside <= 0:
                break
            numbers[row, start : start + inside] = len(lengths)
            lengths.append(inside)
            start += part
    numbers[numbers < 0] = len(lengths)
    return torch.from_numpy(numbers), torch.tensor(lengths, dtype=torch.int64)


@dataclass(frozen=True)
class ForwardRows:
    """The rows of one forward, with this rank's tokens under sequence parallelism.

    `input_ids`, `position_ids` and `labels` (already shifted) are int64 [rows, tokens].
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    documents: tuple[Documents, ...] | None = None
    """Lengths of the documents of each full row. None where each row is one document."""
    shared: tuple[Documents, ...] | None = None
    """Number of tokens of an earlier document that each document continues. None if no document does."""
    examples: Examples | None = None
    """Documents of the rows, for objectives on documents. Their `index` covers only this rank's tokens."""
    token_types: torch.Tensor | None = None
    """Token types for encoders, int64 [rows, tokens]: 1 in the second text of a pair, else 0."""
    next_ids: torch.Tensor | None = None
    """Token id after each of `input_ids` in its document, for multi-token prediction; arbitrary at document ends."""
    next_labels: torch.Tensor | None = None
    """Label after each of `labels` in its document; IGNORE_INDEX at document ends."""
    real: RealTokens | None = None
    """Which tokens are no padding, and the documents to which they belong. None where no auxiliary loss needs them."""
    supervised: torch.Tensor | None = None
    """Positions of supervised labels in the flattened rows, int64; None means to derive them from `labels`."""
    next_supervised: torch.Tensor | None = None
    """Positions of supervised labels in `next_labels`, int64; None means to derive them from `next_labels`."""


def with_tensors(rows: ForwardRows, change: Callable[[torch.Tensor], torch.Tensor]) -> ForwardRows:
    """Copy of `rows` in which `change` is applied to each tensor, e.g. to move it to a device."""

    def changed(value: Any) -> Any:  # noqa: ANN401 - a field of the rows
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, RealTokens):
            return RealTokens(*map(change, value))
        if isinstance(value, (ForwardRows, Examples, TopLogProbs, AnswerNumbers)):
            return replace(value, **{each.name: changed(getattr(value, each.name)) for each in fields(value)})
        return value

    return changed(rows)  # type: ignore[no-any-return]


def find_supervised(labels: torch.Tensor) -> torch.Tensor:
    """Positions of supervised labels in the flattened rows, int64 [supervised tokens]. They are computed before labels
    are copied to a GPU, where the unknown length of the result would synchronise host and GPU.
    """
    return (labels.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)


class StageOutput(NamedTuple):
    """Result of a forward on any pipeline stage but the last."""

    hidden: torch.Tensor
    """Hidden states for the next stage, [rows, tokens, width]."""
    loss: torch.Tensor | None
    """Contribution of this stage's layers to the auxiliary losses, scalar; None without one."""
    sums: torch.Tensor
    """Sums of the terms of the auxiliary losses for metrics, fp64."""
