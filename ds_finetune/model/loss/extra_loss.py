"""Auxiliary losses, which are added to the objective's loss. Each of their terms is a mean over units, such as tokens
or documents, of the global batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.objectives.objective import LossAndSums, Objective, Term
from ds_finetune.plan.mesh import Mesh


class ExtraLoss(ABC):
    """Base class of auxiliary losses. Each rank computes them for its own layers."""

    name: str
    terms: tuple[Term, ...]
    sum_names: tuple[str, ...]
    """Names of the sums for metrics that a forward of the auxiliary loss returns. No other loss uses these names."""
    trains_embedding: bool = False
    """Whether the auxiliary loss trains the input embedding. The last pipeline stage then has a copy of it."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Compute the auxiliary loss's metrics from its `sums`, and from the number of units (tokens, documents, ...)
        in a global batch or evaluation. Without units all metrics are 0.
        """

    def listen(self, rows: ForwardRows, *, is_counting: bool, is_first: bool) -> AbstractContextManager[None]:
        """Context of a forward of the layers, in which the auxiliary loss records what it needs from them.

        `is_counting` is true in training steps. `is_first` is false if an earlier chunk of an interleaved pipeline on
        this rank has already run the same rows.
        """
        return nullcontext()

    @abstractmethod
    def loss(self, rows: ForwardRows, hidden: torch.Tensor, weights: torch.Tensor) -> LossAndSums | None:
        """The auxiliary loss of a forward times its weight, after the layers ran; None if this stage has no part in it.

        `hidden` [rows, tokens, width] are the states after the final norm, or those sent to the next stage. `weights`,
        fp64 [terms], has a factor for each term's sum over units.
        """

    def counted(self, mesh: Mesh) -> torch.Tensor | None:
        """This rank's counts since the last call, such as tokens per expert, fp64 on its device. The engine sums them
        over all ranks. None if the loss counts nothing.
        """
        return None

    def finish_step(
        self, on_device: torch.Tensor, on_host: torch.Tensor, *, num_tokens: int, is_skipped: bool
    ) -> object:
        """Called at the end of a step of `num_tokens` tokens with the counts of all ranks, `on_device` and as a copy
        `on_host`. Observers get the result as `StepRecord.counted[name]`.
        """
        return None


def add_extra_losses(
    extras: Sequence[ExtraLoss], rows: ForwardRows, hidden: torch.Tensor, weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Sum of the auxiliary losses of a forward (None if there are none), and each loss's sums for metrics, fp64."""
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
    """The objective's loss together with all auxiliary losses. The objective's terms and sums come first."""

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
        """Metrics of the objective and the auxiliary losses, by name. `loss` excludes the auxiliary losses."""
        metrics = self.objective.metrics(sums, counts)
        for extra in self.extras:
            metrics |= extra.metrics(sums, counts)
        return metrics

    def named(self, sums: Sequence[float]) -> dict[str, float]:
        """Name each of the `sums`, which are in the order of `sum_names`."""
        return dict(zip(self.sum_names, sums, strict=True))

    @property
    def _parts(self) -> tuple[Objective | ExtraLoss, ...]:
        return (self.objective, *self.extras)
