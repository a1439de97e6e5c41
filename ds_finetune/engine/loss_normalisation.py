"""Normalises the loss: each of its terms is the mean over its units of the global batch, in every layout."""

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from ds_finetune.model.forward_rows import StageOutput
from ds_finetune.objectives.objective import LossAndSums, Term


def term_weights(terms: Sequence[Term], counts: Mapping[str, float]) -> torch.Tensor:
    """What the sum of each term over the units of a micro-batch is multiplied by, fp64 [terms].

    `counts` are the numbers of units of the global batch, so that the sum over all micro-batches is the mean.
    """
    return torch.tensor([term.weight / max(counts[term.unit], 1) for term in terms], dtype=torch.float64)


def scale_for_deepspeed(loss: torch.Tensor, *, zero_ranks: int) -> torch.Tensor:
    """A micro-batch's contribution to the loss of the global batch (scalar), as DeepSpeed's backward needs it.

    DeepSpeed divides gradients by its `zero_ranks` ranks when it reduces them (0.19.8, zero/stage_1_and_2.py,
    engine.allreduce_bucket). The sum over ranks is the mean already, so the loss is multiplied by that number.

    The result must not be the tensor that the module returned: at stage 0, the gradient of that one would be divided by
    the accumulation steps (runtime/engine.py:3179), because the hook of the module's output runs before the one that
    marks the backward as DeepSpeed's own.
    """
    return loss * float(zero_ranks)


def detached_sums(out: LossAndSums | StageOutput, number: int) -> torch.Tensor:
    """The `number` sums of a forward, fp64; a pipeline stage before the last has zeros for the objective's, which come
    first.
    """
    return functional.pad(out.sums, (number - len(out.sums), 0))
