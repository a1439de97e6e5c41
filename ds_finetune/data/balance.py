"""Divides the rows of a global batch over ranks and forwards so that ranks wait little for each other.

The global batch stays the same set of rows, and so do its loss and its gradient, up to the order in which they are
summed.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_SWAPS = 200
_NEARLY_EVEN = 1e-3
"""Parts whose sums differ by this share of their mean are left alone."""


@dataclass(frozen=True)
class Division:
    """How many rows a rank and a forward have, and when ranks wait for each other."""

    dp: int
    micro_batch_size: int
    forwards: int
    """Forwards of a step on a rank."""
    meets_each_forward: bool
    """Whether ranks wait for each other in every forward or backward, and not only at the end of a step."""

    @property
    def share(self) -> int:
        """Rows of a rank in a step."""
        return self.micro_batch_size * self.forwards


def divide_rows(costs: NDArray[np.float64], division: Division) -> list[list[int]]:
    """The row indices of each rank, in the order of its forwards; `costs` [dp x share] are the rows' costs.

    It is a function of the costs alone: every rank computes the same division. Rows of similar cost share a forward,
    which also keeps unpacked rows from being padded much. Forwards are done in descending order of cost.

    Where ranks meet in each forward, the n-th forwards of all ranks get rows that follow one another by cost; otherwise
    whole shares are evened out: the costliest row left goes to the rank with the least so far (Graham's LPT rule, with
    equal numbers of rows), and swaps even out what is left.
    """
    assert len(costs) == division.dp * division.share
    order = np.argsort(-costs, kind="stable")
    if not division.meets_each_forward:
        shares = _even_out(order.tolist(), costs, division.dp)
        return [sorted(share, key=lambda index: (-costs[index], index)) for share in shares]
    ranks: list[list[int]] = [[] for _ in range(division.dp)]
    totals = np.zeros(division.dp)
    for chunk in order.reshape(division.forwards, -1):
        parts = _even_out(chunk.tolist(), costs, division.dp)
        parts.sort(key=lambda part: -costs[part].sum())
        for rank, part in zip(np.argsort(totals, kind="stable").tolist(), parts, strict=True):
            ranks[rank] += part
            totals[rank] += costs[part].sum()
    return ranks


def _even_out(descending: Sequence[int], costs: NDArray[np.float64], number: int) -> list[list[int]]:
    """`number` parts of equally many rows with sums of costs that are nearly the same."""
    parts: list[list[int]] = [[] for _ in range(number)]
    size = len(descending) // number
    heap = [(0.0, part) for part in range(number)]
    for index in descending:
        total, part = heapq.heappop(heap)
        parts[part].append(index)
        if len(parts[part]) < size:
            heapq.heappush(heap, (total + float(costs[index]), part))
    if size > 1:
        _swap(parts, costs)
    return parts


def _swap(parts: list[list[int]], costs: NDArray[np.float64]) -> None:
    """Swap rows of the costliest and the cheapest part, in place, as long as that brings the two closer."""
    totals = np.array([costs[part].sum() for part in parts])
    for _ in range(_MOST_SWAPS):
        most, least = int(totals.argmax()), int(totals.argmin())
        gap = float(totals[most] - totals[least])
        if gap <= _NEARLY_EVEN * totals.mean():
            return
        given, taken = _best_swap(costs[parts[most]], costs[parts[least]], gap)
        difference = float(costs[parts[most][given]] - costs[parts[least][taken]])
        # A swap of rows that differ by d changes the gap to |gap - 2 d|.
        if not 0 < difference < gap:
            return
        parts[most][given], parts[least][taken] = parts[least][taken], parts[most][given]
        totals[most] -= difference
        totals[least] += difference


def _best_swap(dear: NDArray[np.float64], cheap: NDArray[np.float64], gap: float) -> tuple[int, int]:
    """Indices of the row of each part whose difference comes nearest to half the gap."""
    order = np.argsort(cheap, kind="stable")
    wanted = dear - gap / 2
    right = np.searchsorted(cheap[order], wanted).clip(1, len(cheap) - 1)
    near = np.stack([order[right - 1], order[right]])
    misses = np.abs(cheap[near] - wanted)
    side, given = np.unravel_index(int(misses.argmin()), misses.shape)
    return int(given), int(near[side, given])
