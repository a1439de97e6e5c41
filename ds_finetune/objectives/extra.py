"""Auxiliary losses, which are trained beside the loss of an objective: experts' balance, multi-token prediction.

The law of objectives holds for them too: each term is the mean over its units of the global batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_finetune.objectives.objective import Objective, Term


class Extra(ABC):
    """What the engine knows of an auxiliary loss: its terms, and the metrics that follow from its sums."""

    name: str
    terms: tuple[Term, ...]
    sum_names: tuple[str, ...]
    """Names of the numbers that a forward adds up, for `metrics`; no other part of the loss has the same names."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Metrics by name from the sums and the numbers of units of a global batch, or of all held-out rows. `sums` has
        those of the whole loss. Without a unit every metric is 0.
        """


@dataclass(frozen=True)
class TotalLoss:
    """An objective and its auxiliary losses: their terms and sums, the objective's first, then those of each extra."""

    objective: Objective
    extras: tuple[Extra, ...] = ()

    @property
    def terms(self) -> tuple[Term, ...]:
        """Terms of all parts."""
        return tuple(term for part in self._parts for term in part.terms)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums of all parts."""
        return tuple(name for part in self._parts for name in part.sum_names)

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Metrics by name, the objective's `loss` first, which has no auxiliary loss in it."""
        found = self.objective.metrics(sums, counts)
        for extra in self.extras:
            found |= extra.metrics(sums, counts)
        return found

    def named(self, sums: Sequence[float]) -> dict[str, float]:
        """Sums by name."""
        return dict(zip(self.sum_names, sums, strict=True))

    @property
    def _parts(self) -> tuple[Objective | Extra, ...]:
        return (self.objective, *self.extras)
