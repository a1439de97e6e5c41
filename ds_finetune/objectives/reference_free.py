"""Preference objectives without a reference model: CPO, ORPO and SimPO."""

import torch
from torch.nn.functional import logsigmoid, relu

from ds_finetune.config.objectives import CpoObjective, OrpoObjective, SimpoObjective
from ds_finetune.objectives.objective import DocumentLogProbs
from ds_finetune.objectives.pairs import PairObjective, per_token


class ContrastivePreference(PairObjective):
    """DPO's loss without a reference, plus the cross entropy of the chosen answers (Xu et al., arXiv 2401.08417)."""

    def __init__(self, section: CpoObjective) -> None:
        super().__init__(section.name, beta=section.beta, nll_weight=section.nll_weight)
        self._variant = section.loss

    def scores(self, documents: DocumentLogProbs) -> torch.Tensor:
        """The log-probability of each answer in nats; with `ipo` its mean over the answer's tokens, as in TRL 1.16."""
        return per_token(documents.logp, documents) if self._variant == "ipo" else documents.logp

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """-log sigmoid of the margin, its hinge, or its squared distance from 1 / (2 beta)."""
        difference = chosen - rejected
        if self._variant == "ipo":
            return (difference - 1 / (2 * self.beta)) ** 2
        margin = self.beta * difference
        return relu(1 - margin) if self._variant == "hinge" else -logsigmoid(margin)


LARGEST_MEAN = -1e-6
"""Mean log-probabilities are clamped to this: log(1 - e^m) has no finite gradient at m = 0."""


class OddsRatioPreference(PairObjective):
    """The cross entropy of the chosen answers plus beta times -log sigmoid of the log odds ratio, without a reference
    (Hong et al., arXiv 2403.07691).

    The cross entropy is the mean over the tokens of the chosen *answers* of the global batch, as in LLaMA-Factory. TRL
    1.16 takes the tokens of the prompts as well (experimental/orpo/orpo_trainer.py:799).
    """

    def __init__(self, section: OrpoObjective) -> None:
        super().__init__(section.name, beta=section.beta, pair_weight=section.beta, nll_weight=1.0)

    def scores(self, documents: DocumentLogProbs) -> torch.Tensor:
        """log(p / (1 - p)) of each answer, where log p is the mean log-probability of its tokens."""
        mean = per_token(documents.logp, documents).clamp(max=LARGEST_MEAN)
        return mean - torch.log(-torch.expm1(mean))

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Equation 7 of the paper."""
        return -logsigmoid(chosen - rejected)


class SimplePreference(PairObjective):
    """-log sigmoid(beta x difference of the mean log-probabilities - gamma), without a reference.

    Meng et al., arXiv 2405.14734.
    """

    def __init__(self, section: SimpoObjective) -> None:
        super().__init__(section.name, beta=section.beta)
        self._gamma = section.gamma

    def scores(self, documents: DocumentLogProbs) -> torch.Tensor:
        """The mean log-probability of the tokens of each answer, in nats."""
        return per_token(documents.logp, documents)

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Equation 6 of the paper."""
        return -logsigmoid(self.beta * (chosen - rejected) - self._gamma)
