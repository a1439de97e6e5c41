"""What objectives on pairs of answers have in common: terms, sums and metrics.

Such an objective gives each answer a score, and its loss compares the scores of the two answers of a pair. An answer's
*reward* is its score times beta.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch

from ds_finetune.objectives.objective import DocumentLogProbs, DocumentObjective, LossAndSums, Term

_PER_PAIR = ("reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")
"""Metrics that are means over pairs."""


class PairObjective(DocumentObjective):
    """A loss of the scores of chosen and rejected answers, the mean over the pairs of the global batch.

    With `nll_weight`, the cross entropy of the chosen answers is added: the mean over their supervised tokens in the
    global batch, which has a count of its own.
    """

    documents_per_unit = 2

    def __init__(self, name: str, *, beta: float, pair_weight: float = 1.0, nll_weight: float = 0.0) -> None:
        self.name = name
        self.beta = beta
        nll = (Term("chosen_tokens", nll_weight),) if nll_weight else ()
        self.terms = (Term("pairs", pair_weight), *nll)
        self.sum_names = ("pairs", "nll", *_PER_PAIR) if nll else ("pairs", *_PER_PAIR)

    @abstractmethod
    def scores(self, documents: DocumentLogProbs) -> torch.Tensor:
        """The score of each answer, fp64 [documents]."""

    @abstractmethod
    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """The loss of each pair from the scores of its answers, fp64 [pairs] each."""

    def loss(self, documents: DocumentLogProbs, weights: torch.Tensor, baseline: torch.Tensor) -> LossAndSums:
        """The contribution of these pairs to the loss of the step; `baseline` is not used."""
        assert len(documents.logp) % 2 == 0, f"{len(documents.logp)} documents are not pairs"
        chosen, rejected = self.scores(documents).view(-1, 2).unbind(1)
        logp_chosen, logp_rejected = documents.logp.view(-1, 2).unbind(1)
        terms = [self.pair_losses(chosen, rejected).sum(), *([-logp_chosen.sum()] if len(self.terms) > 1 else [])]
        margin = chosen - rejected
        numbers = (self.beta * margin, margin > 0, self.beta * chosen, self.beta * rejected, logp_chosen, logp_rejected)
        sums = [term.detach().double() for term in terms] + [number.detach().double().sum() for number in numbers]
        return LossAndSums((torch.stack(terms) * weights).sum(), torch.stack(sums))

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The loss, the cross entropy `nll` in nats per chosen token where it is a term, and means over pairs.

        Equal scores are no win in `reward_accuracy`. `logp_chosen` and `logp_rejected` are in nats per answer.
        """
        means = [sums[name] / max(counts[term.unit], 1) for name, term in zip(self.sum_names, self.terms, strict=False)]
        pairs = max(counts["pairs"], 1)
        return {
            "loss": sum(term.weight * mean for term, mean in zip(self.terms, means, strict=True)),
            **({"nll": means[1]} if len(means) > 1 else {}),
            **{name: sums[name] / pairs for name in _PER_PAIR},
        }


def log_ratios(documents: DocumentLogProbs) -> torch.Tensor:
    """log p(answer) - log p_reference(answer) of each answer, in nats, fp64 [documents]."""
    return documents.logp - documents.reference


def per_token(numbers: torch.Tensor, documents: DocumentLogProbs) -> torch.Tensor:
    """Sums over the supervised tokens of each answer, fp64 [documents], as means; 0 for an answer without tokens."""
    return numbers / documents.num_tokens.clamp(min=1)
