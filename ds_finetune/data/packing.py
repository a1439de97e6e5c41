"""Best-fit-decreasing packing: documents, longest first, go into the fullest row that has room for them."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


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
