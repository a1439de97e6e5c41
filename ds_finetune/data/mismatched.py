"""Pairs prompts with the answers of other examples, from which KTO estimates its baseline z0.

The pairing depends only on the data and the seed. So z0 of a batch does not depend on ranks, micro-batches or the order
of rows, and the reference log-probabilities can be computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ds_finetune.data.prepared_rows import PreparedRows, Row, next_token_labels, pack
from ds_finetune.errors import DataError

_SEED = 1
"""Last number of the random seed of the pairing, which gives other permutations than the seeds of epochs."""


@dataclass(frozen=True, eq=False)
class MismatchedAnswers:
    """Documents made from `rows` with the prompt of one document and the answer of another.

    The mismatched document with the prompt of document n has the number n + (number of documents). It is truncated to
    `max_seq_len` tokens and has at least one token of the answer.
    """

    rows: PreparedRows
    seed: int
    max_seq_len: int
    is_packed: bool

    def check(self, name: str) -> None:
        """Raise DataError if all examples of the data set `name` (a key of the run file) have the same prompt."""
        first = self._prompt(0)
        if all(np.array_equal(self._prompt(number), first) for number in range(1, len(self))):
            raise DataError(
                f"the {len(self)} examples of {name} have one prompt, but objective kto estimates z0 from each prompt "
                "with the answer to a different prompt",
                hint="add examples of other prompts, or use objective dpo with pairs of answers",
            )

    def __len__(self) -> int:
        return self.rows.counts.documents

    def partner(self, number: int) -> int:
        """Number of the document whose answer follows the prompt of document `number` in a mismatched document.

        It is the next document with a different prompt in a seeded permutation.
        """
        order, positions = self._order
        prompt, position = self._prompt(number), int(positions[number])
        followers = (int(order[(position + step) % len(order)]) for step in range(1, len(order)))
        return next(other for other in followers if not np.array_equal(self._prompt(other), prompt))

    def rows_for(self, row_ids: Sequence[int]) -> list[Row]:
        """Rows of documents that join each prompt of the data rows `row_ids` with another sample's answer. They are
        packed if the data is.
        """
        rows = self.rows
        numbers = np.concatenate([rows.order[rows.offsets[row] : rows.offsets[row + 1]] for row in row_ids])
        if not self.is_packed:
            return [self._row([number]) for number in numbers.tolist()]
        lengths = np.array([self._length(number) for number in numbers.tolist()], dtype=np.int64)
        return [self._row(numbers[row].tolist()) for row in pack(lengths, self.max_seq_len)]

    @cached_property
    def _order(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = np.random.default_rng([self.seed, 0, _SEED]).permutation(len(self))
        return order, np.argsort(order)

    def _prompt(self, number: int) -> NDArray[np.int32]:
        ids, answer = self._ids(number)
        return ids[:answer]

    def _ids(self, number: int) -> tuple[NDArray[np.int32], int]:
        documents = self.rows.documents
        span = slice(documents.offsets[number], documents.offsets[number + 1])
        return documents.ids[span], 1 + int(np.argmax(documents.mask[span][1:]))

    def _length(self, number: int) -> int:
        _, answer = self._ids(number)
        ids, other_answer = self._ids(self.partner(number))
        return min(answer + len(ids) - other_answer, self.max_seq_len)

    def _row(self, numbers: Sequence[int]) -> Row:
        documents = [self.document(number) for number in numbers]
        parts = [(ids, np.arange(len(ids)), labels) for ids, labels in documents]
        return Row.of(parts, np.array(numbers, dtype=np.int64) + len(self), np.zeros(len(numbers)))

    def document(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids and shifted labels, [tokens] each, of the mismatched document with the prompt of document `number`."""
        other = self.partner(number)
        ids, answer = self._ids(other)
        span = slice(self.rows.documents.offsets[other], self.rows.documents.offsets[other + 1])
        prompt, mask = self._prompt(number), self.rows.documents.mask[span][answer:]
        mismatched = np.concatenate([prompt, ids[answer:]])[: self.max_seq_len]
        is_supervised = np.concatenate([np.zeros(len(prompt), dtype=np.bool_), mask])[: self.max_seq_len]
        return mismatched, next_token_labels(mismatched, is_supervised)
