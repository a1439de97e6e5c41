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
    """Which of this rank's tokens in a forward are not padding, and to which documents they belong."""

    document: torch.Tensor
    """Index of each flattened token's document, int64 [tokens]; for padding, the number of documents."""
    lengths: torch.Tensor
    """Length of each document in tokens, summed over sequence parallel ranks, int64 [documents]."""

    @property
    def is_real(self) -> torch.Tensor:
        """Mask of the tokens that are not padding, bool [tokens]."""
        return self.document < len(self.lengths)


def find_real_tokens(
    real: Sequence[int], documents: Sequence[Sequence[int]] | None, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of each token's document, int64 [rows, tokens], and lengths of the documents, int64 [documents]. In each
    row the first `real` tokens are not padding. Without `documents` each row is one document.
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
    """Rows of tokens of one forward; with sequence parallelism, this rank's tokens of each row.

    `input_ids`, `position_ids` and shifted `labels` are int64 [rows, tokens].
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    documents: tuple[Documents, ...] | None = None
    """Lengths of the documents of each full row; None means one document per row."""
    shared: tuple[Documents, ...] | None = None
    """For each document, how many first tokens of an earlier document are its prefix; None if none has a prefix."""
    examples: Examples | None = None
    """Documents in the rows, for objectives that score documents. `examples.index` covers this rank's tokens only."""
    token_types: torch.Tensor | None = None
    """Token types of an encoder's tokens, int64 [rows, tokens]: 1 in the second text of a pair, else 0."""
    next_ids: torch.Tensor | None = None
    """For multi-token prediction: the token after each of `input_ids` in its document; arbitrary for the last one."""
    next_labels: torch.Tensor | None = None
    """For multi-token prediction: the label after each of `labels` in its document; IGNORE_INDEX for the last one."""
    real: RealTokens | None = None
    """The tokens that are not padding, with their documents; None if no auxiliary loss needs them."""
    supervised: torch.Tensor | None = None
    """Indices of supervised labels in the flattened rows, int64. If None, the forward searches `labels` for them."""
    next_supervised: torch.Tensor | None = None
    """Indices of supervised labels in the flattened `next_labels`, int64. If None, the forward searches for them."""


def with_tensors(rows: ForwardRows, change: Callable[[torch.Tensor], torch.Tensor]) -> ForwardRows:
    """Copy of `rows` with `change` applied to each tensor, for example to move it to a device."""

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
    """Indices of supervised labels in the flattened rows, int64 [supervised tokens]. Call this before labels are copied
    to a GPU, where the unknown size of the result makes the host wait.
    """
    return (labels.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)


class StageOutput(NamedTuple):
    """Output of a forward on a pipeline stage that is not the last."""

    hidden: torch.Tensor
    """Hidden states for the next pipeline stage, [rows, tokens, width]."""
    loss: torch.Tensor | None
    """Auxiliary losses of this stage's layers, scalar; None if there are none."""
    sums: torch.Tensor
    """Sums of the auxiliary losses for metrics, fp64."""
