"""What a forward of the model takes and gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_finetune.model.attention.by_document import Documents
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import AnswerNumbers, Examples, TopLogProbs


class RealTokens(NamedTuple):
    """The documents of a forward without padding; on a sequence parallel rank its tokens of them."""

    document: torch.Tensor
    """Number of the document of each token of the flattened rows, int64 [tokens]; padding has the number after the last
    one.
    """
    lengths: torch.Tensor
    """Tokens of each document, on all ranks together, int64 [documents]."""

    @property
    def is_real(self) -> torch.Tensor:
        """Whether each token is no padding, [tokens]."""
        return self.document < len(self.lengths)


def find_real_tokens(
    real: Sequence[int], documents: Sequence[Sequence[int]] | None, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the documents of all tokens, int64 [rows, tokens], and the lengths of the documents, int64
    [documents]. The first `real` tokens of each row are no padding; with `documents` None each row is one.
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
    """The rows of one forward as this rank has them; a sequence parallel rank has its tokens of them.

    `input_ids`, `position_ids` and `labels` (already shifted) are int64 [rows, tokens].
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    documents: tuple[Documents, ...] | None = None
    """Lengths of the documents of each whole row; None where each row is one document."""
    shared: tuple[Documents, ...] | None = None
    """How many tokens of an earlier one each document continues; None where none does."""
    examples: Examples | None = None
    """The documents as an objective sees them; their `index` has this rank's tokens."""
    token_types: torch.Tensor | None = None
    """1 in the second text of a pair of texts, int64 [rows, tokens], for encoders."""
    next_ids: torch.Tensor | None = None
    """The id after each of `input_ids` in its document, for multi-token prediction; anything at a document's end."""
    next_labels: torch.Tensor | None = None
    """The label after each of `labels` in its document, IGNORE_INDEX at its end."""
    real: RealTokens | None = None
    """The documents without padding; None where nothing asks for them."""
    supervised: torch.Tensor | None = None
    """Positions in the flattened rows whose label counts, int64 [supervised tokens]; found in `labels` where None."""
    next_supervised: torch.Tensor | None = None
    """Positions whose label in `next_labels` counts, int64 [number]; found in `next_labels` where None."""


def with_tensors(rows: ForwardRows, change: Callable[[torch.Tensor], torch.Tensor]) -> ForwardRows:
    """`rows` with `change` applied to each of their tensors."""

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
    """Positions in the flattened rows of labels that count, int64 [supervised tokens]. A GPU waits for their number, so
    they are found before labels are copied to it.
    """
    return (labels.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)


class StageOutput(NamedTuple):
    """Result of a forward on a pipeline stage before the last."""

    hidden: torch.Tensor
    """For the next stage, [rows, tokens, width]."""
    loss: torch.Tensor | None
    """Contribution of this stage's layers to the auxiliary losses, scalar; None where they have none."""
    sums: torch.Tensor
    """Sums of the auxiliary losses, fp64."""
