"""Best-fit-decreasing packing by counting: documents go, longest first, into the fullest row that still holds them."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def pack(lengths: Numbers, capacity: int) -> list[Numbers]:
    """Document numbers of each row, so that no row holds more than `capacity` tokens; the same lengths give the same
    rows.

    Rows are kept in one bucket per free space; the smallest space that fits is the lowest set bit of an integer with a
    bit per occupied bucket, so a document costs capacity / 64 machine words at most.
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
    """A set of small numbers that finds its smallest member from a given one on, as one big integer of bits."""

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
