"""Auxiliary losses, which are trained beside the loss of an objective."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.objectives.extra import Extra
from ds_finetune.objectives.objective import LossAndSums, StepNumbers


class ExtraLoss(Extra):
    """An auxiliary loss, computed with the layers that this rank holds."""

    trains_embedding: bool = False
    """Whether its gradient reaches the embedding, of which the last pipeline stage has a copy."""

    def listen(self) -> AbstractContextManager[None]:
        """What is open during the forward of the layers whose part of the loss is asked for afterwards."""
        return nullcontext()

    @abstractmethod
    def loss(self, rows: ForwardRows, hidden: torch.Tensor, weights: torch.Tensor) -> LossAndSums | None:
        """The contribution of a forward to the loss of the step, after the forward of the layers.

        `hidden` [rows, tokens, width] are the states after the final norm, or what a pipeline stage sends on. `weights`
        fp64 [terms] multiply the sums of the terms over their units. None where the layers of this stage
        have no part in it.
        """


def numbers_of_parts(numbers: StepNumbers, extras: Sequence[ExtraLoss]) -> tuple[StepNumbers, list[torch.Tensor]]:
    """The numbers for the objective alone, and the factors of the terms of each extra loss."""
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
