"""A few of many cells, in which everything occurs that occurs in the many: values of an axis, or of two or three axes
together.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from heapq import heapify, heapreplace
from itertools import combinations
from operator import or_
from random import Random
from typing import TypeVar

Cell = TypeVar("Cell")
_TRIES = 10


def pairwise(cells: Sequence[Cell], axes: Callable[[Cell], tuple[Hashable, ...]]) -> list[Cell]:
    """Cells with every two values of two axes that occur together in one; `axes` gives a cell's value on each axis."""
    return _covering(cells, axes, together=2)


def in_threes(cells: Sequence[Cell], axes: Callable[[Cell], tuple[Hashable, ...]]) -> list[Cell]:
    """Cells with every three values of three axes that occur together in one."""
    return _covering(cells, axes, together=3)


def each_value(cells: Sequence[Cell], axes: Callable[[Cell], tuple[Hashable, ...]]) -> list[Cell]:
    """Cells with every value of every axis."""
    return _covering(cells, axes, together=1)


def _covering(cells: Sequence[Cell], axes: Callable[[Cell], tuple[Hashable, ...]], *, together: int) -> list[Cell]:
    """The fewest that some greedy choices find; they differ in which of several equally good cells they take."""
    bits: dict[Hashable, int] = {}
    held = [
        sum(1 << bits.setdefault(values, len(bits)) for values in combinations(enumerate(axes(cell)), together))
        for cell in cells
    ]
    chosen = min((_choose(held, Random(seed)) for seed in range(_TRIES)), key=len)
    return [cells[number] for number in sorted(chosen)]


def _choose(held: Sequence[int], rng: Random) -> list[int]:
    """Numbers of sets of bits that hold together every bit, each of them one that no other holds."""
    missing, chosen = reduce(or_, held, 0), list[int]()
    order = rng.sample(range(len(held)), len(held))
    # What a set adds never grows: the first one whose number is still right adds the most.
    heap = [(-held[number].bit_count(), place) for place, number in enumerate(order)]
    heapify(heap)
    while missing:
        least, place = heap[0]
        bits = held[order[place]] & missing
        if bits.bit_count() != -least:
            heapreplace(heap, (-bits.bit_count(), place))
            continue
        chosen.append(order[place])
        missing &= ~bits
    for number in tuple(chosen):
        others = reduce(or_, (held[other] for other in chosen if other != number), 0)
        if held[number] & ~others == 0:
            chosen.remove(number)
    return chosen
