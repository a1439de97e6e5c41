"""Mixes rows of several sources in given shares; the order is a pure function of (seed, epoch)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ds_finetune.errors import DataError

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """Weighted sources, whose rows are consecutive in the data.

    An epoch is one pass over the main source: the one with the largest weight, and of equal weights the one with the
    most rows. Every other source gives as many rows as its weight requires, rounded. If that is fewer than it has, the
    next epoch continues it; if more, its rows repeat.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Rows of each source."""
    draws: tuple[int, ...]
    """Rows of each source per epoch."""

    @classmethod
    def of(cls, weights: Mapping[str, float], sizes: Sequence[int]) -> Self:
        """Mixture from the weights of sources by name; DataError where an epoch would have no row of a source."""
        fractions = np.array(list(weights.values())) / sum(weights.values())
        main = max(range(len(sizes)), key=lambda source: (fractions[source], sizes[source]))
        draws = tuple(int(fraction / fractions[main] * sizes[main] + 0.5) for fraction in fractions)
        for name, draw, fraction in zip(weights, draws, fractions, strict=True):
            if not draw:
                raise DataError(
                    f"data.train gives `{name}` a share of {fraction:.3%}, which is no row in an epoch of "
                    f"{sum(draws):,} rows",
                    hint="give it a larger weight, or leave it out",
                )
        return cls(tuple(weights), tuple(sizes), draws)

    @property
    def rows_per_epoch(self) -> int:
        """Rows of an epoch."""
        return sum(self.draws)

    @property
    def fingerprint(self) -> str:
        """Sizes and draws as a text."""
        return " + ".join(f"{draw} of {size}" for draw, size in zip(self.draws, self.sizes, strict=True))

    def per_epoch(self, sums: Sequence[float]) -> float:
        """Expected sum of a quantity over the rows of an epoch, given its sum over all rows of each source."""
        return sum(part / size * draw for part, size, draw in zip(sums, self.sizes, self.draws, strict=True))

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> Numbers:
        """Row numbers of an epoch, int64 [rows_per_epoch].

        Each source is spread evenly: its count among the first n rows differs from its share of n by less than one row,
        for two sources. A source's rows come in passes over all its rows, each shuffled or in the order of its files.
        """
        jitter = np.random.default_rng([seed, epoch]).random(self.rows_per_epoch) if shuffle else 0.5
        numbers = np.concatenate([np.arange(draw) for draw in self.draws])
        order = np.argsort((numbers + jitter) / np.repeat(self.draws, self.draws), kind="stable")
        sources = range(len(self.draws))
        rows = [self._rows_of_epoch(source, seed=seed, epoch=epoch, shuffle=shuffle) for source in sources]
        return np.concatenate(rows)[order]

    def count_rows(self, total_rows: int, *, seed: int, shuffle: bool) -> list[int]:
        """Rows of each source among the first `total_rows` rows of the concatenated epochs."""
        epochs, rest = divmod(total_rows, self.rows_per_epoch)
        last = self.order(seed=seed, epoch=epochs, shuffle=shuffle)[:rest]
        of_last = np.bincount(np.searchsorted(self._ends, last, side="right"), minlength=len(self.sizes))
        return [epochs * draw + int(more) for draw, more in zip(self.draws, of_last, strict=True)]

    @property
    def _ends(self) -> Numbers:
        """Row number after the last row of each source."""
        return np.cumsum(self.sizes)

    def _rows_of_epoch(self, source: int, *, seed: int, epoch: int, shuffle: bool) -> Numbers:
        """Rows of a source in an epoch, in their order."""
        size, draw = self.sizes[source], self.draws[source]
        passes, index = np.divmod(np.arange(epoch * draw, (epoch + 1) * draw), size)
        if shuffle:
            # Plus one, since numpy's seeds [a, b] and [a, b, 0] are the same.
            orders = {p: np.random.default_rng([seed, p, source + 1]).permutation(size) for p in set(passes.tolist())}
            index = np.concatenate([orders[p][index[passes == p]] for p in sorted(orders)])
        return index + self._ends[source] - size
