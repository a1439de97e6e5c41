"""Objectives of a classification head: classification, regression, and the reward model on pairs of answers.

Metrics are computed from sums over all examples.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ds_finetune.config.objectives import ClassificationObjective, RewardObjective
from ds_finetune.objectives.objective import LossAndSums, ScoreObjective, Term

Floats = NDArray[np.float64]
_ROUNDING = 1e-13
"""A variance below this fraction of the fp64 sum of squares is the rounding error of equal numbers."""


class Classification(ScoreObjective):
    """Classification objective: cross entropy of the classes, averaged over the examples of the global batch."""

    name = "classification"
    terms = (Term("examples"),)

    def __init__(self, num_labels: int, *, label_smoothing: float = 0.0) -> None:
        assert num_labels > 1, num_labels
        self.num_outputs = num_labels
        self.label_smoothing = label_smoothing
        self.sum_names = ("loss", *(f"{kind}_{k}" for kind in ("hits", "predicted", "true") for k in range(num_labels)))

    def loss(self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> LossAndSums:
        """Contribution of these documents to the loss of the step; `targets` are class indices.

        The sums are the loss in nats and three numbers for each class, from which all metrics follow: how many
        documents are predicted as the class (`predicted`), are labelled with it (`true`), and both (`hits`). Of equal
        scores, the first class is predicted.
        """
        classes = targets.long()
        total = functional.cross_entropy(
            scores.double(), classes, reduction="sum", label_smoothing=self.label_smoothing
        )
        predicted = scores.detach().argmax(dim=1)
        # The sizes of the results of `torch.bincount` and boolean indexing depend on data, so they would synchronise
        # the GPU.
        numbers = torch.arange(self.num_outputs, device=scores.device)
        is_predicted, is_true = predicted[:, None] == numbers, classes[:, None] == numbers
        counted = [flags.sum(0).double() for flags in (is_predicted & is_true, is_predicted, is_true)]
        sums = torch.cat([total.detach().view(1), *counted])
        return LossAndSums((total * weights[0]).to(scores.dtype), sums)

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Mean loss in nats, accuracy, F1 and Matthews' correlation.

        With two classes, `f1` is the score of class 1. With more, `f1_macro` is the mean over the classes that occur.
        """
        hits, predicted, true = (
            np.array([sums[f"{kind}_{k}"] for k in range(self.num_outputs)]) for kind in ("hits", "predicted", "true")
        )
        examples = max(counts["examples"], 1)
        both = predicted + true
        f1 = 2 * hits / np.maximum(both, 1)
        is_binary = self.num_outputs == 2
        mean = {"f1": float(f1[1])} if is_binary else {"f1_macro": float(f1.sum() / max((both > 0).sum(), 1))}
        # Matthews' correlation of several classes (Gorodkin 2004); 0 if it is not defined.
        total = true.sum()
        spread = (total**2 - predicted @ predicted) * (total**2 - true @ true)
        return {
            "loss": sums["loss"] / examples,
            "accuracy": float(hits.sum()) / examples,
            **mean,
            "matthews": float((hits.sum() * total - predicted @ true) / math.sqrt(spread)) if spread > 0 else 0.0,
        }


class Regression(ScoreObjective):
    """Regression objective: squared error of one number, averaged over the examples of the global batch."""

    name = "classification"
    terms = (Term("examples"),)
    sum_names = ("loss", "score", "target", "score_squared", "target_squared", "product")
    num_outputs = 1
    gathers_scores = True

    def loss(self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> LossAndSums:
        """Contribution of these documents to the loss of the step, and the sums for Pearson's correlation."""
        score = scores.double().squeeze(1)
        total = (score - targets).square().sum()
        x = score.detach()
        sums = torch.stack([part.sum() for part in (total.detach(), x, targets, x * x, targets**2, x * targets)])
        return LossAndSums((total * weights[0]).to(scores.dtype), sums)

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Mean squared error, and Pearson's correlation of scores and targets (0 if it is not defined)."""
        number = max(counts["examples"], 1)
        covariance = sums["product"] - sums["score"] * sums["target"] / number
        spreads = {name: sums[f"{name}_squared"] - sums[name] ** 2 / number for name in ("score", "target")}
        is_defined = all(spread > _ROUNDING * sums[f"{name}_squared"] for name, spread in spreads.items())
        pearson = covariance / math.sqrt(math.prod(spreads.values())) if is_defined else 0.0
        return {"loss": sums["loss"] / number, "pearson": pearson}

    def score_metrics(self, scores: Floats, targets: Floats) -> dict[str, float]:
        """Spearman's correlation of `scores` and `targets` [documents]; 0 if it is not defined."""
        ranks = [_ranks(scores), _ranks(targets)]
        if not all(len(set(rank)) > 1 for rank in ranks):
            return {"spearman": 0.0}
        return {"spearman": float(np.corrcoef(ranks[0], ranks[1])[0, 1])}


def _ranks(values: Floats) -> Floats:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[where]


def make_classification(section: ClassificationObjective) -> Classification | Regression:
    """The regression objective for one label, else the classification objective."""
    number = section.num_outputs
    return Regression() if number == 1 else Classification(number, label_smoothing=section.label_smoothing)


_MEANS = ("reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected")


class Reward(ScoreObjective):
    """Objective of a reward model: -log sigmoid(R_chosen - R_rejected - margin) + center_weight x (R_chosen +
    R_rejected)^2, averaged over the pairs of the global batch (TRL 1.16, trainer/reward_trainer.py:788).
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
        """Contribution of these pairs to the loss of the step. A chosen answer's target is the margin of its pair."""
        chosen, rejected = scores.double().view(-1, 2).unbind(1)
        losses = -functional.logsigmoid(chosen - rejected - targets.view(-1, 2)[:, 0])
        total = (losses + self.center_weight * (chosen + rejected).square()).sum()
        won = (chosen > rejected).double()
        numbers = (total, chosen - rejected, won, chosen, rejected)
        return LossAndSums(
            (total * weights[0]).to(scores.dtype), torch.stack([number.detach().sum() for number in numbers])
        )

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Mean loss in nats, and means over pairs: difference of the rewards, accuracy, and the reward of each side.

        The accuracy is the fraction of pairs whose chosen answer has the higher reward. Equal rewards count as wrong.
        """
        return {name: sums[name] / max(counts["pairs"], 1) for name in self.sum_names}


def make_reward(section: RewardObjective) -> Reward:
    """The reward objective for the run file's section `objective`."""
    return Reward(center_weight=section.center_weight)
