"""Normalises the loss: it is the mean over the supervised tokens of the global batch, in every layout."""

import torch

from ds_finetune.model.loss import TokenLoss


def normalise_loss(loss_sum: torch.Tensor, num_supervised: float, *, zero_ranks: int) -> torch.Tensor:
    """A micro-batch's summed loss (fp32 scalar) as its contribution to the mean over the `num_supervised` tokens of
    the global batch, for backward.

    DeepSpeed divides gradients by its `zero_ranks` ranks when it reduces them (0.19.8, zero/stage_1_and_2.py,
    engine.allreduce_bucket). The sum over ranks is a mean already, so the loss is multiplied by that number.
    """
    return loss_sum * (zero_ranks / max(num_supervised, 1))


def mean_per_token(total: float, num_supervised: float) -> float:
    """The mean over supervised tokens; 0 where there are none."""
    return total / max(num_supervised, 1)


def loss_and_correct(out: TokenLoss | torch.Tensor) -> torch.Tensor:
    """Summed loss in nats and number of correct predictions, fp64 [2]; zeros of hidden states, the output of a pipeline
    stage before the last.
    """
    if not isinstance(out, TokenLoss):
        return torch.zeros(2, dtype=torch.float64, device=out.device)
    return torch.stack([out.loss_sum.detach().double(), out.num_correct.double()])
