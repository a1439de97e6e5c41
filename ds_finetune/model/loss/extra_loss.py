"""Auxiliary losses, which are trained beside the loss of an objective.

As in objectives, each term is the mean over its units of the global batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.objectives.objective import LossAndSums, Objective, StepNumbers, Term
from ds_finetune.plan.mesh import Mesh


class ExtraLoss(ABC):
    """An auxiliary loss, computed with the layers that this rank holds."""

    name: str
    terms: tuple[Term, ...]
    sum_names: tuple[str, ...]
    """Names of the numbers that a forward adds up, for `metrics`; no other part of the loss has the same names."""
    trains_embedding: bool = False
    """Whether its gradient reaches the embedding, of which the last pipeline stage has a copy."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Metrics by name from the sums and the numbers of units of a global batch, or of all held-out rows. `sums` has
        those of the whole loss. Without a unit every metric is 0.
        """

    def listen(self, rows: ForwardRows, *, is_counting: bool, is_first: bool) -> AbstractContextManager[None]:
        """What is open during the forward of the layers whose part of the loss is asked for afterwards.

        `is_counting` in the forwards of a step. `is_first` unless this rank has passed the same rows through an earlier
        chunk of the model.
        """
        return nullcontext()

    @abstractmethod
    def loss(self, rows: ForwardRows, hidden: torch.Tensor, weights: torch.Tensor) -> LossAndSums | None:
        """The contribution of a forward to the loss of the step, after the forward of the layers.

        `hidden` [rows, tokens, width] are the states after the final norm, or what a pipeline stage sends on. `weights`
        fp64 [terms] multiply the sums of the terms over their units. None where the layers of this stage
        have no part in it.
        """

    def counted(self, mesh: Mesh) -> torch.Tensor | None:
        """What this rank has counted since the last call, in the forwards of a step: fp64 on its device, to be added up
        over all ranks. None where nothing is counted.
        """
        return None

    def finish_step(self, here: torch.Tensor, on_host: torch.Tensor, *, num_tokens: int, is_skipped: bool) -> object:
        """Act on the sum of `counted` over all ranks, which is `here` on the device and `on_host`, after a step on a
        global batch of `num_tokens`. What it returns is given to observers, as `StepRecord.counted[name]`.
        """
        return None


def numbers_of_parts(numbers: StepNumbers, extras: Sequence[ExtraLoss]) -> tuple[StepNumbers, list[torch.Tensor]]:
    """Only the numbers for the objective, and the factors of the terms of each extra loss."""
    sizes = [len(extra.terms) for extra in extras]
    own, *others = numbers.weights.split([len(numbers.weights) - sum(sizes), *sizes])
    return numbers._replace(weights=own), others


def add_extra_losses(
    extras: Sequence[ExtraLoss], rows: ForwardRows, hidden: torch.Tensor, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The sum of all contributions (None without one), and all sums in the order of the extras, fp64."""
    total, sums = None, [torch.zeros(0, dtype=torch.float64, device=hidden.device)]
    for extra, factors in zip(extras, weights, strict=True):
        found = extra.loss(rows, hidden, factors)
        if found is None:
            sums.append(sums[0].new_zeros(len(extra.sum_names)))
            continue
        total = found.loss if total is None else total + found.loss
        sums.append(found.sums)
    return total, torch.cat(sums)


@dataclass(frozen=True)
class TotalLoss:
    """An objective and its auxiliary losses: their terms and sums, the objective's first, then those of the others."""

    objective: Objective
    extras: tuple[ExtraLoss, ...] = ()

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
    def _parts(self) -> tuple[Objective | ExtraLoss, ...]:
        return (self.objective, *self.extras)
