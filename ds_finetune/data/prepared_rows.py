"""Training rows of tokens, read by index from memory-mapped documents.

A unit is one document, or the two documents of a pair. A row has one unit, or several if rows are packed. Packing is
best-fit-decreasing: units, longest first, go into the fullest row that has room for them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from ds_finetune.config.units import share_text
from ds_finetune.data.documents import Counts, Documents
from ds_finetune.data.mixture import Mixture
from ds_finetune.data.row_kind import DIALOGUE, RowKind
from ds_finetune.objectives.labels import IGNORE_INDEX

Ints = NDArray[np.int32]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowDocuments:
    """The documents of a training row, in order. Each array has one element per document."""

    lengths: Numbers
    numbers: Numbers
    """Indices, in the data, of the documents of a training row."""
    targets: NDArray[np.float64]
    """Target of each document: class index, rating, margin, 1 or 0 for good or bad answers, or 0 without a target."""
    second: Numbers
    """Index of the first token of each document's second text; the document's length if it has only one text."""


@dataclass(frozen=True, eq=False)
class Row:
    """One row of tokens: `input_ids`, `position_ids` and `labels`, int32 [tokens] each.

    Positions count up within a document. A document that begins at position n > 0 continues the first n tokens of the
    last earlier document that begins at 0. `labels[t]` is the token after `input_ids[t]` in the same document if that
    token is supervised, else IGNORE_INDEX.
    """

    input_ids: Ints
    position_ids: Ints
    labels: Ints
    supervised: int
    documents: RowDocuments | None = None
    is_filler: bool = False

    @classmethod
    def of(
        cls,
        parts: Sequence[tuple[Ints, Numbers | Ints, Ints]],
        numbers: Numbers,
        targets: NDArray[np.float64],
        second: Numbers | None = None,
    ) -> Self:
        """Concatenate documents to a training row. `parts` are the ids, positions and labels of each document, [tokens]
        each; `numbers`, `targets` and `second` are the fields of `RowDocuments`. `second` is None if no
        document has a second text.
        """
        ids, positions, labels = (np.concatenate(arrays).astype(np.int32) for arrays in zip(*parts, strict=True))
        lengths = np.array([len(own) for own, *_ in parts], dtype=np.int64)
        documents = RowDocuments(lengths, numbers, targets, lengths if second is None else second)
        return cls(ids, positions, labels, int((labels != IGNORE_INDEX).sum()), documents)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the row; 0 for a filler row."""
        return 0 if self.is_filler else len(self.input_ids)

    @property
    def num_documents(self) -> int:
        """Number of documents in the row; 0 for a filler row."""
        return 0 if self.is_filler else len(document_starts(self.position_ids))

    @property
    def document_lengths(self) -> Numbers:
        """Number of tokens of each document; empty for a filler row."""
        starts = document_starts(self.position_ids)
        return np.diff(np.append(starts, len(self.position_ids)))[: self.num_documents]


def document_starts(positions: Ints) -> Numbers:
    """Indices at which documents begin in a row: positions there are not the preceding position plus 1."""
    return np.flatnonzero(np.diff(positions, prepend=-2) != 1)


def next_token_labels(ids: Ints, mask: NDArray[np.bool_]) -> Ints:
    """Labels of a document, int32 [tokens]: the next token where `mask` marks it as supervised, else IGNORE_INDEX."""
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    labels[:-1] = np.where(mask[1:], ids[1:], IGNORE_INDEX)
    return labels


def empty_row(pad_token_id: int) -> Row:
    """Make a filler row of one padding token, which completes the last batch of a run."""
    return Row(
        input_ids=np.array([pad_token_id], dtype=np.int32),
        position_ids=np.zeros(1, dtype=np.int32),
        labels=np.array([IGNORE_INDEX], dtype=np.int32),
        supervised=0,
        is_filler=True,
    )


_SHOWN_CLASSES = 8
_LINE_FEED = ord("\n")
_ODD = np.uint64(0x9E3779B97F4A7C15)
"""Odd factor in the hash of a pair's first document, so that exchanging both documents changes the hash."""


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """Training rows in memory-mapped arrays. Row i has the units `order[offsets[i] : offsets[i + 1]]`.

    Unit u is document u, or documents 2u and 2u + 1 if units are pairs. Only `order` and `offsets`, a few bytes per
    unit, are in memory.
    """

    documents: Documents
    order: Numbers
    offsets: Numbers
    counts: Counts
    content: str = ""
    """Hash of all tokens and masks of the training rows, computed at writing; empty for streamed rows."""
    notes: tuple[str, ...] = ()
    """Remarks on the data for the user, e.g. on splits that are not read, or on a cache that was rebuilt."""
    mixture: Mixture | None = None
    """Proportions of the training sources, whose rows are consecutive; None where an epoch has every row once."""
    kind: RowKind = DIALOGUE
    """Kind of the training rows. For labelled texts it includes the classes found in the data."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Row:
        numbers = self._documents_of(self.order[self.offsets[index] : self.offsets[index + 1]])
        data, parts = self.documents, []
        for start, end in zip(data.offsets[numbers].tolist(), data.offsets[numbers + 1].tolist(), strict=True):
            own = data.ids[start:end]
            parts.append((own, np.arange(len(own)), next_token_labels(own, data.mask[start:end])))
        return Row.of(parts, numbers.astype(np.int64), data.targets[numbers], data.second[numbers].astype(np.int64))

    def sizes(self, index: int) -> tuple[Numbers, int]:
        """Lengths of the documents of row `index`, and its number of supervised tokens, without reading tokens."""
        numbers = self._documents_of(self.order[self.offsets[index] : self.offsets[index + 1]])
        lengths, supervised = self._sizes_of(numbers)
        return lengths, int(supervised.sum())

    @property
    def num_labels(self) -> int:
        """Number of classes; 1 for regression, 0 where training rows have no labels."""
        return self.kind.num_labels or 0 if self.kind.name == "labelled" else 0

    @property
    def num_units(self) -> int:
        """Number of training examples or pairs, or of documents where the loss is a sum over tokens."""
        return self.counts.documents // max(self.kind.documents_per_unit, 1)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all training rows, without padding."""
        return self.counts.tokens

    @property
    def rows_per_epoch(self) -> int:
        """Number of training rows in an epoch."""
        return len(self) if self.mixture is None else self.mixture.rows_per_epoch

    @property
    def tokens_per_epoch(self) -> float:
        """Number of tokens in an epoch without padding; for a mixture, the expected number."""
        return self.num_tokens if self.mixture is None else self.mixture.per_epoch(self.tokens_of_sources)

    @property
    def tokens_of_sources(self) -> list[int]:
        """Number of tokens of each source of the mixture, in all rows of the source."""
        return [int(lengths.sum()) for lengths in self._lengths_by_source()]

    def units_of_sources(self) -> dict[str, range]:
        """Unit indices (documents, pairs or examples) of each source by its name, which is empty without a mixture."""
        ends = np.cumsum([len(part) for part in self._lengths_by_source()]) // max(self.kind.documents_per_unit, 1)
        names = ("",) if self.mixture is None else self.mixture.names
        starts = [0, *ends[:-1].tolist()]
        return {name: range(start, end) for name, start, end in zip(names, starts, ends.tolist(), strict=True)}

    def summary(self) -> str:
        """One line for reports: numbers of rows, units and tokens, fractions of supervised and truncated tokens."""
        supervised = self.counts.supervised / max(self.num_tokens, 1)
        units = f"{self.num_units:,} {self.kind.unit}, " if self.kind.documents_per_unit else ""
        is_packed = len(self) < self.num_units
        rows = f"{len(self):,} packed rows of {self.counts.read:,} rows" if is_packed else f"{len(self):,} rows"
        text = f"{rows}, {units}{self.num_tokens:,} tokens"
        text += f", {share_text(supervised)} of them supervised" if self.kind.has_supervised_tokens else ""
        text += "".join(f"; {name} {line}" for name, line in self.label_lines())
        if self.counts.split:
            text += (
                f"; {self.counts.split:,} long texts are cut: each piece begins with the last token before the cut and "
                "does not see what is before that"
            )
        if self.counts.truncated:
            text += (
                f"; {self.counts.truncated:,} rows truncated, which cuts off "
                f"{share_text(self.counts.truncated_ratio, 2)} of all tokens"
            )
        return text

    @property
    def mean_attended(self) -> float:
        """Mean number of positions that a token attends to, with causal attention within its document."""
        squares = [float((lengths.astype(np.float64) ** 2).sum()) for lengths in self._lengths_by_source()]
        return (squares[0] if self.mixture is None else self.mixture.per_epoch(squares)) / 2 / self.tokens_per_epoch

    def fingerprint(self) -> str:
        """Hash of all tokens and masks, and of how documents are divided into rows. It is the same on every machine."""
        assert self.content
        digest = xxhash.xxh3_64()
        for numbers in (self.order, self.offsets):
            digest.update(np.ascontiguousarray(numbers, dtype=np.int64).tobytes())
        text = f"{len(self)} rows, {self.num_tokens} tokens, content {self.content}, order {digest.hexdigest()}"
        return text if self.mixture is None else f"{text}, mixed {self.mixture.fingerprint}"

    def fill_ratio(self, max_seq_len: int) -> float:
        """Fraction of positions in packed rows that are tokens, not padding: tokens / (rows x `max_seq_len`)."""
        return self.num_tokens / (len(self) * max_seq_len)

    def prompts_and_answers(self, number: int) -> list[tuple[list[int], list[int]]]:
        """Prompts and reference answers of the first `number` documents, to compare generated answers with.

        The answer is the last supervised span, and the prompt all ids before it. Rejected and bad answers are left out.
        """
        assert self.kind.has_supervised_tokens
        numbers: Sequence[int] = range(0, self.counts.documents, max(self.kind.documents_per_unit, 1))
        if self.kind.name == "marked":
            numbers = np.flatnonzero(self.documents.targets).tolist()
        parts = []
        for index in numbers[:number]:
            ids, mask = self.document(index)
            end = len(mask) - mask[::-1].index(True)
            start = end - next((n for n, is_supervised in enumerate(mask[end - 1 :: -1]) if not is_supervised), end)
            parts.append((ids[:start], ids[start:end]))
        return parts

    def prompt_ids(self, number: int) -> list[int]:
        """Token ids of prompt `number`, including the header with which the chat template opens the answer."""
        return self.document(number)[0]

    def record(self, number: int) -> dict[str, Any]:
        """All columns of the data row of prompt `number`. A reference answer is in the column `answer`."""
        columns: dict[str, Any] = json.loads(_line(self.documents.records, self._line_ends["records"], number))
        return columns

    def where(self, number: int) -> str:
        """Location of the data row of prompt `number`, such as `train.jsonl line 7`."""
        return _line(self.documents.places, self._line_ends["places"], number)

    @cached_property
    def _line_ends(self) -> dict[str, Numbers]:
        texts = {"records": self.documents.records, "places": self.documents.places}
        return {name: np.flatnonzero(np.asarray(text) == _LINE_FEED) for name, text in texts.items()}

    def unit_digests(self) -> NDArray[np.uint64]:
        """Hash of the tokens of each document, pair or example, uint64 [units]."""
        digests = np.asarray(self.documents.digests).reshape(-1, max(self.kind.documents_per_unit, 1))
        return digests[:, 0] if digests.shape[1] == 1 else digests[:, 0] * _ODD + digests[:, 1]

    def count_units(self, ids: Sequence[int], documents_per_unit: int) -> dict[str, int]:
        """Count supervised tokens, pairs, documents and so on in the rows `ids`, as `batches.count_rows` does."""
        units = [self.order[self.offsets[i] : self.offsets[i + 1]] for i in ids]
        numbers = self._documents_of(np.concatenate([np.zeros(0, dtype=np.int64), *units]))
        lengths, supervised = self._sizes_of(numbers)
        examples = len(numbers) // documents_per_unit if documents_per_unit else 0
        return {
            "supervised_tokens": int(supervised.sum()),
            "chosen_tokens": int(supervised[::2].sum()) if documents_per_unit == 2 else 0,
            "pairs": examples if documents_per_unit == 2 else 0,
            "examples": examples,
            "documents": int((lengths > 0).sum()),
            "tokens": int(lengths.sum()),
        }

    def document(self, number: int) -> tuple[list[int], list[bool]]:
        """Token ids of document `number`, and its mask of supervised tokens."""
        span = slice(self.documents.offsets[number], self.documents.offsets[number + 1])
        return self.documents.ids[span].tolist(), self.documents.mask[span].tolist()

    def _sizes_of(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        starts, ends = self.documents.offsets[numbers], self.documents.offsets[numbers + 1]
        mask = np.asarray(self.documents.mask)
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        supervised = [np.count_nonzero(mask[start + 1 : end]) for start, end in spans]
        return np.asarray(ends - starts, dtype=np.int64), np.array(supervised, dtype=np.int64)

    def _documents_of(self, units: Numbers) -> Numbers:
        size = max(self.kind.documents_per_unit, 1)
        return (units[:, None] * size + np.arange(size)).reshape(-1)

    def label_lines(self) -> list[tuple[str, str]]:
        """Lines (name and text) about the labels of training rows: numbers of good and bad answers, fractions of
        classes, or the range of regression labels. Rows without labels have no lines.
        """
        targets = self.documents.targets
        if self.kind.name == "marked":
            good = int(targets.sum())
            return [("answers", f"{good:,} good, {len(targets) - good:,} bad")]
        if self.kind.is_regression:
            return [("labels", f"from {targets.min():g} to {targets.max():g}")]
        if self.kind.name != "labelled":
            return []
        fractions = np.bincount(targets.astype(np.int64), minlength=self.num_labels) / max(len(targets), 1)
        names = self.kind.labels or tuple(map(str, range(self.num_labels)))
        shown = [f"{name} {share_text(fraction)}" for name, fraction in zip(names, fractions.tolist(), strict=True)]
        more = f" and {len(shown) - _SHOWN_CLASSES} more" if len(shown) > _SHOWN_CLASSES else ""
        return [("classes", f"{len(shown)} ({', '.join(shown[:_SHOWN_CLASSES])}{more})")]

    def _lengths_by_source(self) -> list[Numbers]:
        lengths = np.diff(self.documents.offsets)[self._documents_of(self.order)]
        sizes = (len(self),) if self.mixture is None else self.mixture.sizes
        ends = self.offsets[np.cumsum(sizes)] * max(self.kind.documents_per_unit, 1)
        return np.split(lengths, ends[:-1])


Rows = Sequence[Row] | PreparedRows
"""Training rows that can be read by index in any order."""


def _line(text: NDArray[np.uint8], ends: Numbers, number: int) -> str:
    start = int(ends[number - 1]) + 1 if number else 0
    return bytes(text[start : int(ends[number])]).decode()


def one_unit_a_row(documents: Documents, kind: RowKind) -> tuple[Numbers, Numbers]:
    """Put each document, pair or example into a row of its own; returns `order` and `offsets` of `PreparedRows`."""
    units = len(documents.targets) // max(kind.documents_per_unit, 1)
    return np.arange(units), np.arange(units + 1)


def pack_units(
    documents: Documents, kind: RowKind, max_seq_len: int, parts: Sequence[int] | None = None
) -> tuple[Numbers, Numbers]:
    """Pack documents, pairs or examples into rows of at most `max_seq_len` tokens; returns `order` and `offsets` of
    `PreparedRows`.

    `parts` are the numbers of units of consecutive sources, which do not share rows; None for one source.
    """
    lengths = np.diff(documents.offsets).reshape(-1, max(kind.documents_per_unit, 1)).sum(axis=1)
    starts = np.cumsum([0, *([len(lengths)] if parts is None else parts)]).tolist()
    rows = [row + start for start, end in pairwise(starts) for row in pack(lengths[start:end], max_seq_len)]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return np.concatenate(rows), offsets


def pack(lengths: Numbers, capacity: int) -> list[Numbers]:
    """Pack documents by best-fit-decreasing into rows of at most `capacity` tokens; returns the document indices of
    each row.

    `open_rows` groups rows by free space. Bit s of `spaces` says that some row has s free tokens. The best fit is the
    lowest set bit from `length` on, so finding it reads capacity / 64 machine words.
    """
    assert int(lengths.max(initial=0)) <= capacity
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        if fitting := spaces >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                spaces &= ~(1 << space)
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        if rest := space - length:
            open_rows[rest].append(row)
            spaces |= 1 << rest
    return [np.array(row, dtype=np.int64) for row in rows]
