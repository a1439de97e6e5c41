"""Tokenised rows by number, read from a memory map."""

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ds_finetune.data.documents import Counts, Documents
from ds_finetune.data.rows import Row
from ds_finetune.labels import IGNORE_INDEX


@dataclass(frozen=True, eq=False)
class PreparedRows:
    """Rows made of documents: row i holds documents `order[offsets[i] : offsets[i + 1]]`; a few bytes a document stay
    in memory.
    """

    documents: Documents
    order: NDArray[np.int64]
    offsets: NDArray[np.int64]
    counts: Counts
    content: str = ""
    """Hash of all tokens and masks, taken when they were prepared; empty for rows of a stream."""
    notes: tuple[str, ...] = ()
    """Lines for people: splits that were not read, a cache that was built again."""

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Row:
        """Row `index`, its documents one behind the other."""
        parts = [self._document(int(number)) for number in self.order[self.offsets[index] : self.offsets[index + 1]]]
        ids, positions, labels = (np.concatenate(arrays).astype(np.int32) for arrays in zip(*parts, strict=True))
        return Row(ids, positions, labels, supervised=int((labels != IGNORE_INDEX).sum()))

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return self.counts.tokens

    @property
    def num_supervised_tokens(self) -> int:
        """Tokens that carry loss."""
        return self.counts.supervised

    def summary(self) -> str:
        """Rows, tokens, share of supervised tokens and what was lost to truncation, in a line."""
        share = self.num_supervised_tokens / max(self.num_tokens, 1)
        text = f"{len(self):,} rows, {self.num_tokens:,} tokens, {share:.1%} of them supervised"
        if self.counts.split:
            text += f"; {self.counts.split:,} long texts split"
        if self.counts.truncated:
            text += (
                f"; {self.counts.truncated:,} rows truncated, which loses {self.counts.truncated_ratio:.2%} of "
                "all tokens"
            )
        return text

    @property
    def mean_attended(self) -> float:
        """Positions a token attends to on average under causal attention within its document."""
        lengths = np.diff(self.documents.offsets)[self.order].astype(np.float64)
        return float((lengths**2).sum() / 2 / lengths.sum())

    def fingerprint(self) -> str:
        """A hash of every token, its mask, and how documents lie in rows, the same on any machine."""
        assert self.content
        digest = xxhash.xxh3_64()
        for numbers in (self.order, self.offsets):
            digest.update(np.ascontiguousarray(numbers, dtype=np.int64).tobytes())
        return f"{len(self)} rows, {self.num_tokens} tokens, content {self.content}, order {digest.hexdigest()}"

    def fill_ratio(self, max_seq_len: int) -> float:
        """Share of `max_seq_len` x rows that is tokens."""
        return self.num_tokens / (len(self) * max_seq_len)

    def prompts_and_answers(self, number: int) -> list[tuple[list[int], list[int]]]:
        """The first documents as (ids up to the last supervised stretch, ids of that stretch), for answers to be
        compared.
        """
        return [self._last_answer(i) for i in range(min(number, self.counts.documents))]

    def document(self, number: int) -> tuple[list[int], list[bool]]:
        """Ids of a document and which of them are supervised."""
        here = slice(self.documents.offsets[number], self.documents.offsets[number + 1])
        return self.documents.ids[here].tolist(), self.documents.mask[here].tolist()

    def _document(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
        here = slice(self.documents.offsets[number], self.documents.offsets[number + 1])
        ids, mask = self.documents.ids[here], self.documents.mask[here]
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
        labels[:-1] = np.where(mask[1:], ids[1:], IGNORE_INDEX)
        return ids, np.arange(len(ids)), labels

    def _last_answer(self, number: int) -> tuple[list[int], list[int]]:
        ids, mask = self.document(number)
        end = max(place for place, supervised in enumerate(mask) if supervised) + 1
        start = end
        while start > 0 and mask[start - 1]:
            start -= 1
        return ids[:start], ids[start:end]
