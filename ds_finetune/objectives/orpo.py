"""Odds ratio preference optimisation (Hong et al., arXiv 2403.07691)."""

import torch
from torch.nn.functional import logsigmoid

from ds_finetune.config.objectives import OrpoObjective
from ds_finetune.objectives.objective import DocumentLogProbs
from ds_finetune.objectives.pairs import PairObjective, per_token

LARGEST_MEAN = -1e-6
"""Mean log-probabilities are clamped to this: log(1 - e^m) has no finite gradient at m = 0."""


class OddsRatioPreference(PairObjective):
    """The cross entropy of the chosen answers plus beta times -log sigmoid of the log odds ratio, without a reference.

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
