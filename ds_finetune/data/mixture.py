"""Mixes the training rows of several sources in given proportions. The order depends only on the seed and the epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ds_finetune.errors import DataError

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """Weighted training sources, whose rows are consecutive in the data.

    An epoch is one pass over the main source: the source with the largest weight, and among equal weights the one with
    the most rows. Every other source gives as many rows as its weight requires, rounded. A source with more rows
    continues in the next epoch; a source with fewer rows repeats them.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Number of training rows of each source of the mixture."""
    draws: tuple[int, ...]
    """Number of training rows that each source of the mixture gives to an epoch."""

    @classmethod
    def of(cls, weights: Mapping[str, float], sizes: Sequence[int]) -> Self:
        """Make a mixture from weights by source; DataError where an epoch would have no row of a source."""
        fractions = np.array(list(weights.values())) / sum(weights.values())
        main = max(range(len(sizes)), key=lambda source: (fractions[source], sizes[source]))
        draws = tuple(int(fraction / fractions[main] * sizes[main] + 0.5) for fraction in fractions)
        for name, draw, fraction in zip(weights, draws, fractions, strict=True):
            if not draw:
                raise DataError(
                    f"data.train gives `{name}` a share of {fraction:.3%}, which is less than one row in an epoch of "
                    f"{sum(draws):,} rows",
                    hint="give it a larger weight, or leave it out",
                )
        return cls(tuple(weights), tuple(sizes), draws)

    @property
    def rows_per_epoch(self) -> int:
        """Number of training rows in an epoch of the mixture."""
        return sum(self.draws)

    @property
    def fingerprint(self) -> str:
        """Identity of the mixture: the number of rows of each source, and how many of them an epoch has."""
        return " + ".join(f"{draw} of {size}" for draw, size in zip(self.draws, self.sizes, strict=True))

    def per_epoch(self, sums: Sequence[float]) -> float:
        """Expected sum of a quantity over the rows of an epoch, from its sum over all rows of each source."""
        return sum(part / size * draw for part, size, draw in zip(sums, self.sizes, self.draws, strict=True))

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> Numbers:
        """Row indices of an epoch in their order, int64 [rows_per_epoch].

        The sources alternate evenly: in the first n rows of an epoch with two sources, the number of rows from one
        source differs from n times its fraction by less than one. Each source is read in passes over all its rows,
        which are shuffled for each pass or stay in the order of the files.
        """
        jitter = np.random.default_rng([seed, epoch]).random(self.rows_per_epoch) if shuffle else 0.5
        numbers = np.concatenate([np.arange(draw) for draw in self.draws])
        order = np.argsort((numbers + jitter) / np.repeat(self.draws, self.draws), kind="stable")
        rows = []
        # Seeds have the source's number from 1 on, because numpy treats the seeds [a, b] and [a, b, 0] alike.
        for number, (size, draw, end) in enumerate(zip(self.sizes, self.draws, self._ends, strict=True), start=1):
            passes, index = np.divmod(np.arange(epoch * draw, (epoch + 1) * draw), size)
            if shuffle:
                orders = {p: np.random.default_rng([seed, p, number]).permutation(size) for p in set(passes.tolist())}
                index = np.concatenate([orders[p][index[passes == p]] for p in sorted(orders)])
            rows.append(index + end - size)
        return np.concatenate(rows)[order]

    def count_rows(self, total_rows: int, *, seed: int, shuffle: bool) -> list[int]:
        """Number of rows of each source among the first `total_rows` rows of a run, over all epochs."""
        epochs, rest = divmod(total_rows, self.rows_per_epoch)
        last = self.order(seed=seed, epoch=epochs, shuffle=shuffle)[:rest]
        of_last = np.bincount(np.searchsorted(self._ends, last, side="right"), minlength=len(self.sizes))
        return [epochs * draw + int(more) for draw, more in zip(self.draws, of_last, strict=True)]

    @property
    def _ends(self) -> Numbers:
        return np.cumsum(self.sizes)
