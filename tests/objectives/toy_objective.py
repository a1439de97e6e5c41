"""An objective as another package has it: its section of the run file, its loss, and its row."""

from typing import Literal

import torch
from pydantic import Field

from ds_finetune.config.objectives import ObjectiveConfig, ObjectiveRow, register
from ds_finetune.objectives.objective import DocumentLogProbs
from ds_finetune.objectives.preferences import PairObjective, per_token


class ToyObjective(ObjectiveConfig):
    """An exponential preference loss."""

    name: Literal["toy"]
    """The exponential of the negative margin, the mean over pairs."""
    beta: float = Field(default=1.0, gt=0)
    """Scale of the margin."""


class ExponentialPreference(PairObjective):
    """exp(-beta x difference of the mean log-probabilities of both answers)."""

    def __init__(self, section: ToyObjective) -> None:
        super().__init__(section.name, beta=section.beta)

    def scores(self, documents: DocumentLogProbs) -> torch.Tensor:
        """The mean log-probability of the tokens of each answer."""
        return per_token(documents.logp, documents)

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """The exponential of each pair's negative margin."""
        return torch.exp(-self.beta * (chosen - rejected))


register(ObjectiveRow(ToyObjective, ExponentialPreference, kind="pairs", unit="pairs", head="documents"))
