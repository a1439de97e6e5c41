"""Contrastive preference optimisation (Xu et al., arXiv 2401.08417)."""

import torch
from torch.nn.functional import logsigmoid, relu

from ds_finetune.config.objectives import CpoObjective
from ds_finetune.objectives.objective import DocumentLogProbs
from ds_finetune.objectives.pairs import PairObjective, per_token


class ContrastivePreference(PairObjective):
    """DPO's loss without a reference, plus the cross entropy of the chosen answers."""

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
