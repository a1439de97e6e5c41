"""Normalises the loss: each term is the mean over its units in the global batch, in every parallel layout."""

from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch.nn import functional

from ds_finetune.model.loss.forward_rows import StageOutput
from ds_finetune.objectives.objective import LossAndSums, Term, Unit

UNITS: tuple[str, ...] = get_args(Unit)


def unit_counts(counts: Mapping[str, float]) -> torch.Tensor:
    """Numbers of units by name as fp64 [units] on the host, in the order of `UNITS`; a missing unit has 0."""
    return torch.tensor([counts.get(unit, 0) for unit in UNITS], dtype=torch.float64)


def term_weights(terms: Sequence[Term], counts: torch.Tensor) -> torch.Tensor:
    """Factors by which the sum of each term over a micro-batch is multiplied, fp64 [terms]. `counts`, fp64 [units], are
    the numbers of units in the global batch, so that the sum over all micro-batches of all ranks is the mean.
    """
    numbers = [counts[UNITS.index(term.unit)].clamp_min(1) for term in terms]
    return torch.stack([number.new_full((), term.weight) / number for term, number in zip(terms, numbers, strict=True)])


def scale_for_deepspeed(loss: torch.Tensor, *, zero_ranks: int) -> torch.Tensor:
    """The scalar on which `backward` is called, from a micro-batch's contribution to the loss of the global batch.

    DeepSpeed divides gradients by the number of its ranks, `zero_ranks`, when it reduces them (0.19.8,
    zero/stage_1_and_2.py, engine.allreduce_bucket). The contributions of all ranks already add up to the mean, so each
    is multiplied by that number.

    The result must be another tensor than the one that the module returned. At stage 0, DeepSpeed would divide the
    gradient of the module's output by the accumulation steps (runtime/engine.py:3179), because the output's hook runs
    before the hook that marks the backward as DeepSpeed's own.
    """
    return loss * float(zero_ranks)


def detached_sums(out: LossAndSums | StageOutput, number: int) -> torch.Tensor:
    """The sums that a forward has returned, fp64 [number]: the sums of the objective, then those of auxiliary losses.
    Pipeline stages before the last do not compute the objective, so they have zeros for its sums.
    """
    return functional.pad(out.sums, (number - len(out.sums), 0))
