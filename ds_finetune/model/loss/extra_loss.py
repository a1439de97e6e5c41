"""Auxiliary losses, which are trained in addition to the objective's loss. Each term of an auxiliary loss is a mean
over the term's units in the global batch.
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
    """Names of the sums that a forward returns and `metrics` reads. They are unique among all parts of the loss."""
    trains_embedding: bool = False
    """Whether the loss has a gradient for the input embedding, of which the last pipeline stage holds a copy."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Compute metrics by name, from the sums and the number of each unit in a global batch or in all held-out rows.
        Without any unit every metric is 0.
        """

    def listen(self, rows: ForwardRows, *, is_counting: bool, is_first: bool) -> AbstractContextManager[None]:
        """Context around the forward of the layers, in which the loss records what it needs from them.

        `is_counting` is true in the forwards of a training step. `is_first` is false where this rank has already passed
        the same rows through an earlier chunk of an interleaved pipeline.
        """
        return nullcontext()

    @abstractmethod
    def loss(self, rows: ForwardRows, hidden: torch.Tensor, weights: torch.Tensor) -> LossAndSums | None:
        """Compute the contribution of a forward to the loss of the step, after the forward of the layers.

        `hidden` [rows, tokens, width] are the states after the final norm, or the states that a pipeline stage sends
        on. `weights` fp64 [terms] multiply the sums of the terms over their units. None means that this stage does not
        contribute.
        """

    def counted(self, mesh: Mesh) -> torch.Tensor | None:
        """Counts of this rank's forwards since the last call, fp64 on its device, to be summed over all ranks. None
        without counts.
        """
        return None

    def finish_step(
        self, on_device: torch.Tensor, on_host: torch.Tensor, *, num_tokens: int, is_skipped: bool
    ) -> object:
        """Called after a step on a global batch of `num_tokens` tokens, with the counts of `counted` summed over all
        ranks: `on_device`, and `on_host` on the CPU. The result is passed to observers as `StepRecord.counted[name]`.
        """
        return None


def numbers_of_parts(numbers: StepNumbers, extras: Sequence[ExtraLoss]) -> tuple[StepNumbers, list[torch.Tensor]]:
    """Split a step's weights of loss terms into those of the objective and those of each auxiliary loss."""
    sizes = [len(extra.terms) for extra in extras]
    main_weights, *others = numbers.weights.split([len(numbers.weights) - sum(sizes), *sizes])
    return numbers._replace(weights=main_weights), others


def add_extra_losses(
    extras: Sequence[ExtraLoss], rows: ForwardRows, hidden: torch.Tensor, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Total auxiliary loss of a forward (None without a contribution), and the sums of each for metrics, fp64."""
    total, sums = None, [torch.zeros(0, dtype=torch.float64, device=hidden.device)]
    for extra, factors in zip(extras, weights, strict=True):
        extra_sums = extra.loss(rows, hidden, factors)
        if extra_sums is None:
            sums.append(sums[0].new_zeros(len(extra.sum_names)))
            continue
        total = extra_sums.loss if total is None else total + extra_sums.loss
        sums.append(extra_sums.sums)
    return total, torch.cat(sums)


@dataclass(frozen=True)
class TotalLoss:
    """An objective and its auxiliary losses. Terms and sums are concatenated, the objective's first."""

    objective: Objective
    extras: tuple[ExtraLoss, ...] = ()

    @property
    def terms(self) -> tuple[Term, ...]:
        """Terms of the objective and of all auxiliary losses."""
        return tuple(term for part in self._parts for term in part.terms)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums of the objective and of all auxiliary losses."""
        return tuple(name for part in self._parts for name in part.sum_names)

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Metrics by name, first the objective's `loss`, which excludes auxiliary losses."""
        metrics = self.objective.metrics(sums, counts)
        for extra in self.extras:
            metrics |= extra.metrics(sums, counts)
        return metrics

    def named(self, sums: Sequence[float]) -> dict[str, float]:
        """Pair each sum with its name."""
        return dict(zip(self.sum_names, sums, strict=True))

    @property
    def _parts(self) -> tuple[Objective | ExtraLoss, ...]:
        return (self.objective, *self.extras)
