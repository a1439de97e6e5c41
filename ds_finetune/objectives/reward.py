"""The loss of a reward model on pairs of answers (Bradley and Terry's model of choices)."""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ds_finetune.config.objectives import RewardObjective
from ds_finetune.objectives.objective import LossAndSums, ScoreObjective, Term

_MEANS = ("reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected")
"""Metrics that are means over pairs."""


class Reward(ScoreObjective):
    """-log sigmoid(R_chosen - R_rejected - margin) + center_weight x (R_chosen + R_rejected)^2, the mean over the pairs
    of the global batch (TRL 1.16, trainer/reward_trainer.py:788).
    """

    name = "reward"
    terms = (Term("pairs"),)
    sum_names = ("loss", *_MEANS)
    num_outputs = 1
    documents_per_unit = 2
    starts_small = True

    def __init__(self, *, center_weight: float = 0.0) -> None:
        self.center_weight = center_weight

    def loss(self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> LossAndSums:
        """The contribution of these pairs to the loss of the step; the target of a chosen answer is the margin."""
        chosen, rejected = scores.double().view(-1, 2).unbind(1)
        losses = -functional.logsigmoid(chosen - rejected - targets.view(-1, 2)[:, 0])
        total = (losses + self.center_weight * (chosen + rejected).square()).sum()
        won = (chosen > rejected).double()
        numbers = (total, chosen - rejected, won, chosen, rejected)
        return LossAndSums(
            (total * weights[0]).to(scores.dtype), torch.stack([number.detach().sum() for number in numbers])
        )

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The mean loss in nats, and means over pairs: the difference of the rewards, the share of pairs whose chosen
        answer has the higher one (equal rewards are no win), and the rewards.
        """
        return {name: sums[name] / max(counts["pairs"], 1) for name in self.sum_names}


def make_reward(section: RewardObjective) -> Reward:
    """The objective of a section of the run file."""
    return Reward(center_weight=section.center_weight)
