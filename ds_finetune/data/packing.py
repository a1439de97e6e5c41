"""Which units each row has: one, or as many as fit. A unit is one document, or the two documents of a pair.

Best-fit-decreasing packing: units, longest first, go into the fullest row that has room for them.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ds_finetune.data.documents import Documents
from ds_finetune.data.row_kind import RowKind

Numbers = NDArray[np.int64]


def one_unit_a_row(documents: Documents, kind: RowKind) -> tuple[Numbers, Numbers]:
    """`order` and `offsets` of `PreparedRows` where each unit is a row."""
    units = len(documents.targets) // max(kind.documents_per_unit, 1)
    return np.arange(units), np.arange(units + 1)


def pack_units(
    documents: Documents, kind: RowKind, max_seq_len: int, parts: Sequence[int] | None = None
) -> tuple[Numbers, Numbers]:
    """`order` and `offsets` of `PreparedRows` where rows of at most `max_seq_len` tokens are filled with units.

    `parts` are numbers of consecutive units; a row has units of one of them. Left out, there is one part.
    """
    lengths = np.diff(documents.offsets).reshape(-1, max(kind.documents_per_unit, 1)).sum(axis=1)
    starts = np.cumsum([0, *([len(lengths)] if parts is None else parts)]).tolist()
    rows = [row + start for start, end in pairwise(starts) for row in pack(lengths[start:end], max_seq_len)]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return np.concatenate(rows), offsets


def pack(lengths: Numbers, capacity: int) -> list[Numbers]:
    """The document indices of each row, for rows of at most `capacity` tokens; the same lengths give the same rows.

    Rows with free space are grouped by that space. An integer has one bit for each space for which there are rows. The
    smallest space that fits is its lowest set bit from `length` on, so a document costs capacity / 64 machine words.
    """
    assert int(lengths.max(initial=0)) <= capacity
    order = np.argsort(-lengths, kind="stable")
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]
    fits = _FreeSpaces(capacity)
    for number in order:
        length = int(lengths[number])
        space = fits.smallest_from(length)
        if space is None:
            row, space = len(rows), capacity
            rows.append([])
        else:
            row = open_rows[space].pop()
            if not open_rows[space]:
                fits.remove(space)
        rows[row].append(int(number))
        left = space - length
        if left:
            if not open_rows[left]:
                fits.add(left)
            open_rows[left].append(row)
    return [np.array(row, dtype=np.int64) for row in rows]


class _FreeSpaces:
    """A set of small numbers, kept as the bits of one integer; finds its smallest member from a bound on."""

    def __init__(self, largest: int) -> None:
        self._bits = 0
        self._largest = largest

    def add(self, space: int) -> None:
        self._bits |= 1 << space

    def remove(self, space: int) -> None:
        self._bits &= ~(1 << space)

    def smallest_from(self, space: int) -> int | None:
        above = self._bits >> space
        return space + (above & -above).bit_length() - 1 if above else None
