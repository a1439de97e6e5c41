"""A row of tokens, and the interface of a collection of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ds_finetune.objectives.labels import IGNORE_INDEX

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class RowDocuments:
    """The documents of a row one after the other, for objectives whose loss is not a sum over tokens.

    Each array has one number for each document; `numbers` int64 count the documents of the data.
    """

    lengths: NDArray[np.int64]
    """Tokens of the document."""
    numbers: NDArray[np.int64]
    targets: NDArray[np.float64]
    """Class, rating, margin, or 1 and 0 for good and bad answers; 0 where the row has none."""
    second: NDArray[np.int64]
    """First token of the second text of a pair of texts; the length where there is none."""


@dataclass(frozen=True, eq=False)
class Row:
    """One row: `input_ids`, `position_ids` (0 at the start of each document) and `labels`, int32 [tokens] each.

    `labels[t]` is the token after `input_ids[t]` in the same document if that token is supervised, else IGNORE_INDEX.
    """

    input_ids: Ints
    position_ids: Ints
    labels: Ints
    supervised: int
    documents: RowDocuments | None = None
    """None where the objective is a sum over tokens."""
    is_filler: bool = False
    """Whether it has no text, but fills a batch."""

    @property
    def num_tokens(self) -> int:
        """Tokens of its text."""
        return 0 if self.is_filler else len(self.input_ids)

    @property
    def num_documents(self) -> int:
        """Documents of its text; each begins at position 0."""
        return 0 if self.is_filler else int((self.position_ids == 0).sum())

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of each document of its text."""
        starts = np.flatnonzero(self.position_ids == 0)
        return np.diff(np.append(starts, len(self.position_ids)))[: self.num_documents]


class Rows(Protocol):
    """Rows by index, in any order."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, index: int) -> Row:
        """Row `index`."""
        ...


@runtime_checkable
class CountedRows(Rows, Protocol):
    """Rows whose units are counted without reading them whole."""

    def count_units(self, ids: Sequence[int], documents_per_unit: int) -> dict[str, int]:
        """Number of each of `objectives.objective.Unit` in the rows `ids`; see `BatchPlan.documents_per_unit`."""
        ...


def next_token_labels(ids: Ints, mask: NDArray[np.bool_]) -> Ints:
    """The label of each token of a document of which `mask` are supervised, int32 [tokens]; see `Row`."""
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    labels[:-1] = np.where(mask[1:], ids[1:], IGNORE_INDEX)
    return labels


def empty_row(pad_token_id: int) -> Row:
    """A row of one padding token, which fills the last batch of a run."""
    return Row(
        input_ids=np.array([pad_token_id], dtype=np.int32),
        position_ids=np.zeros(1, dtype=np.int32),
        labels=np.array([IGNORE_INDEX], dtype=np.int32),
        supervised=0,
        is_filler=True,
    )
