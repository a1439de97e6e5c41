"""SimPO (Meng et al., arXiv 2405.14734)."""

import torch
from torch.nn.functional import logsigmoid

from ds_finetune.config.objectives import SimpoObjective
from ds_finetune.objectives.objective import DocumentLogProbs
from ds_finetune.objectives.pairs import PairObjective, per_token


class SimplePreference(PairObjective):
    """-log sigmoid(beta x difference of the mean log-probabilities - gamma), without a reference."""

    def __init__(self, section: SimpoObjective) -> None:
        super().__init__(section.name, beta=section.beta)
        self._gamma = section.gamma

    def scores(self, documents: DocumentLogProbs) -> torch.Tensor:
        """The mean log-probability of the tokens of each answer, in nats."""
        return per_token(documents.logp, documents)

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Equation 6 of the paper."""
        return -logsigmoid(self.beta * (chosen - rejected) - self._gamma)
