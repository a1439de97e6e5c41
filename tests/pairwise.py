"""A few of many cells, in which everything occurs that occurs in the many: values of an axis, or pairs of values of two
axes.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Cell = TypeVar("Cell")


def pairwise(cells: Sequence[Cell], axes: Callable[[Cell], tuple[Hashable, ...]]) -> list[Cell]:
    """Cells with every two values of two axes that occur together in one; `axes` gives a cell's value on each axis."""
    return _covering(cells, axes, together=2)


def each_value(cells: Sequence[Cell], axes: Callable[[Cell], tuple[Hashable, ...]]) -> list[Cell]:
    """Cells with every value of every axis."""
    return _covering(cells, axes, together=1)


def _covering(cells: Sequence[Cell], axes: Callable[[Cell], tuple[Hashable, ...]], *, together: int) -> list[Cell]:
    """Chosen greedily, in the order given."""
    held = [set(combinations(enumerate(axes(cell)), together)) for cell in cells]
    missing, chosen = set().union(*held), []
    while missing:
        best = max(range(len(cells)), key=lambda number: len(held[number] & missing))
        chosen.append(best)
        missing -= held[best]
    return [cells[number] for number in sorted(chosen)]
