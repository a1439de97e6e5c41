"""Direct preference optimisation (Rafailov et al., arXiv 2305.18290) and its variants."""

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import logsigmoid, relu

from ds_finetune.config.objectives import DpoObjective
from ds_finetune.objectives.objective import DocumentLogProbs
from ds_finetune.objectives.pairs import PairObjective, log_ratios, per_token

MEAN_VARIANTS = ("ipo", "sigmoid_norm")
"""Variants that compare means over the tokens of an answer instead of sums."""


class DirectPreference(PairObjective):
    """A loss of the log-ratios to the reference model of both answers of a pair."""

    def __init__(self, section: DpoObjective) -> None:
        super().__init__(section.name, beta=section.beta, nll_weight=section.nll_weight)
        self.reference_from_adapters = section.reference == "adapters_off"
        self._section = section

    def scores(self, documents: DocumentLogProbs) -> torch.Tensor:
        """The log-ratio to the reference of each answer, or its mean over the answer's tokens (ipo, sigmoid_norm)."""
        ratios = log_ratios(documents)
        return per_token(ratios, documents) if self._section.loss in MEAN_VARIANTS else ratios

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """The variant's loss of each pair."""
        return _VARIANTS[self._section.loss](self._section, chosen, rejected)


def _sigmoid(section: DpoObjective, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Equation 7 of the DPO paper; with label smoothing e its expectation where e of the pairs are swapped (cDPO)."""
    margin, e = section.beta * (chosen - rejected), section.label_smoothing
    return -(1 - e) * logsigmoid(margin) - e * logsigmoid(-margin)


def _robust(section: DpoObjective, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """The estimate of the loss without swapped pairs that has no bias (Chowdhury et al., arXiv 2403.00409)."""
    margin, e = section.beta * (chosen - rejected), section.label_smoothing
    return (-(1 - e) * logsigmoid(margin) + e * logsigmoid(-margin)) / (1 - 2 * e)


def _hinge(section: DpoObjective, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """SLiC's hinge on the margin (Zhao et al., arXiv 2305.10425)."""
    return relu(1 - section.beta * (chosen - rejected))


def _ipo(section: DpoObjective, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Identity preference optimisation (Azar et al., arXiv 2310.12036), of means over tokens as in TRL 1.16."""
    return (chosen - rejected - 1 / (2 * section.beta)) ** 2


def _apo_zero(section: DpoObjective, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """APO-zero (D'Oosterlinck et al., arXiv 2408.06266): for chosen answers that are better than the model's own."""
    return (1 - torch.sigmoid(section.beta * chosen)) + torch.sigmoid(section.beta * rejected)


def _apo_down(section: DpoObjective, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """APO-down (same paper): for chosen answers that are worse than the model's own."""
    return torch.sigmoid(section.beta * chosen) + (1 - torch.sigmoid(section.beta * (chosen - rejected)))


_VARIANTS: Mapping[str, Callable[[DpoObjective, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sigmoid_norm": _sigmoid,
}
