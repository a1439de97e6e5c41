"""Preference objectives: DPO and variants, CPO, ORPO and SimPO on pairs of answers, KTO on single labelled answers.

An objective on pairs gives each answer a score, and its loss compares the scores of the two answers of a pair. The
*reward* of an answer is its score times beta.
"""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch.nn.functional import logsigmoid, relu

from ds_finetune.config.objectives import CpoObjective, DpoObjective, KtoObjective, OrpoObjective, SimpoObjective
from ds_finetune.objectives.objective import DocumentLogProbs, DocumentObjective, LossAndSums, Term

_PER_PAIR = ("reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")
"""Names of the metrics that are means over pairs."""


class PairObjective(DocumentObjective):
    """Base of objectives on pairs. The loss of a pair is a function of both answers' scores, and is averaged over the
    pairs of the global batch.

    With `nll_weight`, the cross entropy of the chosen answers is added as a second term: the mean over their supervised
    tokens in the global batch.
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
        """Score of each answer, fp64 [documents]."""

    @abstractmethod
    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Loss of each pair, fp64 [pairs], from the scores of its answers, fp64 [pairs] each."""

    def loss(self, documents: DocumentLogProbs, weights: torch.Tensor, baseline: torch.Tensor) -> LossAndSums:
        """Contribution of these pairs to the loss of the step. The argument `baseline` is not used."""
        assert len(documents.logp) % 2 == 0, f"{len(documents.logp)} documents are not pairs"
        chosen, rejected = self.scores(documents).view(-1, 2).unbind(1)
        logp_chosen, logp_rejected = documents.logp.view(-1, 2).unbind(1)
        terms = [self.pair_losses(chosen, rejected).sum(), *([-logp_chosen.sum()] if len(self.terms) > 1 else [])]
        margin = chosen - rejected
        numbers = (self.beta * margin, margin > 0, self.beta * chosen, self.beta * rejected, logp_chosen, logp_rejected)
        sums = [term.detach().double() for term in terms] + [number.detach().double().sum() for number in numbers]
        return LossAndSums((torch.stack(terms) * weights).sum(), torch.stack(sums))

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The loss, the cross entropy `nll` in nats per chosen token if it is a term of the loss, and means over pairs.
        `reward_accuracy` counts pairs of equal scores as wrong. `logp_chosen` and `logp_rejected` are nats per answer.
        """
        means = [sums[name] / max(counts[term.unit], 1) for name, term in zip(self.sum_names, self.terms, strict=False)]
        pairs = max(counts["pairs"], 1)
        return {
            "loss": sum(term.weight * mean for term, mean in zip(self.terms, means, strict=True)),
            **({"nll": means[1]} if len(means) > 1 else {}),
            **{name: sums[name] / pairs for name in _PER_PAIR},
        }


def log_ratios(documents: DocumentLogProbs) -> torch.Tensor:
    """log p(answer) - log p_reference(answer) for each answer, in nats, fp64 [documents]."""
    return documents.logp - documents.reference


def per_token(numbers: torch.Tensor, documents: DocumentLogProbs) -> torch.Tensor:
    """Mean over the supervised tokens of each answer, fp64 [documents], from their sum; 0 for an empty answer."""
    return numbers / documents.num_tokens.clamp(min=1)


MEAN_VARIANTS = ("ipo", "sigmoid_norm")
"""DPO variants that compare means of the log-ratios over the tokens of each answer, not sums."""


class DirectPreference(PairObjective):
    """DPO and its variants. The loss depends on the log-ratios of a pair's answers to the reference model.

    CPO (Xu et al., arXiv 2401.08417) has no reference model: log-probabilities take the place of the log-ratios.
    """

    def __init__(self, section: DpoObjective | CpoObjective) -> None:
        super().__init__(section.name, beta=section.beta, nll_weight=section.nll_weight)
        self._variant = section.loss
        self._smoothing = section.label_smoothing if isinstance(section, DpoObjective) else 0.0
        self.reference_from_adapters = isinstance(section, DpoObjective) and section.reference == "adapters_off"

    def scores(self, documents: DocumentLogProbs) -> torch.Tensor:
        """Log-ratio of each answer to the reference model; its mean over tokens with `ipo` and `sigmoid_norm`."""
        ratios = log_ratios(documents) if self.needs_reference else documents.logp
        return per_token(ratios, documents) if self._variant in MEAN_VARIANTS else ratios

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Loss of each pair by the variant of DPO that the run file names."""
        difference, beta, smoothing = chosen - rejected, self.beta, self._smoothing
        margin = beta * difference
        match self._variant:
            case "robust":
                # Robust DPO is unbiased with mislabelled pairs (Chowdhury et al., arXiv 2403.00409).
                losses = -(1 - smoothing) * logsigmoid(margin) + smoothing * logsigmoid(-margin)
                return losses / (1 - 2 * smoothing)
            case "hinge":
                # SLiC's hinge loss (Zhao et al., arXiv 2305.10425).
                return relu(1 - margin)
            case "ipo":
                # IPO's loss (Azar et al., arXiv 2310.12036), on mean log-ratios per token as in TRL 1.16.
                return (difference - 1 / (2 * beta)) ** 2
            case "apo_zero":
                # APO-zero (arXiv 2408.06266), for chosen answers that are better than the model's own.
                return (1 - torch.sigmoid(beta * chosen)) + torch.sigmoid(beta * rejected)
            case "apo_down":
                # APO-down (arXiv 2408.06266), for chosen answers that are worse than the model's own.
                return torch.sigmoid(beta * chosen) + (1 - torch.sigmoid(margin))
        assert self._variant in ("sigmoid", "sigmoid_norm"), self._variant
        # This is DPO's loss (equation 7 of the paper). With label smoothing e it is the expected loss if a fraction e
        # of the pairs were swapped (cDPO). Without smoothing, an infinite margin must have the loss 0, not NaN.
        losses = -(1 - smoothing) * logsigmoid(margin)
        return losses - smoothing * logsigmoid(-margin) if smoothing else losses


class KahnemanTversky(DocumentObjective):
    """KTO: mean over the examples of the global batch of a loss on single answers labelled good (target 1) or bad (0).

    The gain of an answer is its log-ratio to the reference model minus z0, an estimate of the KL divergence from the
    reference model. z0 is the mean of the log-ratios of prompts paired with another example's answer, over the *global*
    batch, and at least 0.
    """

    terms = (Term("examples"),)
    sum_names = ("examples", "good", "bad", "reward_good", "reward_bad", "kl")

    def __init__(self, section: KtoObjective) -> None:
        self.name = section.name
        self.reference_from_adapters = section.reference == "adapters_off"
        self._section = section

    def loss(self, documents: DocumentLogProbs, weights: torch.Tensor, baseline: torch.Tensor) -> LossAndSums:
        """Contribution to the loss: weighted sum of 1 - sigmoid(s x beta x (log-ratio - z0)), where s is 1 for good
        answers and -1 for bad ones, and `baseline` is z0.
        """
        section, ratios, good = self._section, log_ratios(documents), documents.target
        signs = 2 * good - 1
        factors = section.desirable_weight * good + section.undesirable_weight * (1 - good)
        total = (factors * torch.sigmoid(-signs * section.beta * (ratios - baseline))).sum()
        rewards = section.beta * ratios.detach()
        sums = [
            total.detach(),
            good.sum(),
            (1 - good).sum(),
            (rewards * good).sum(),
            (rewards * (1 - good)).sum(),
            baseline * len(good),
        ]
        return LossAndSums(total * weights[0], torch.stack(sums).double())

    def baseline(self, log_ratio_sum: float, count: float) -> float:
        """KTO's z0 in nats, from the log-ratios of the mismatched answers of a global batch."""
        return max(0.0, log_ratio_sum / max(count, 1))

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The loss, z0 as `kl`, the mean rewards of good and of bad answers, and their difference `reward_margin`.

        The reward of an answer is beta times its log-ratio to the reference model. `reward_good` is missing without
        good answers, `reward_bad` without bad ones, and `reward_margin` unless there are both.
        """
        examples = max(counts["examples"], 1)
        rewards = {f"reward_{side}": sums[f"reward_{side}"] / sums[side] for side in ("good", "bad") if sums[side]}
        margin = {"reward_margin": rewards["reward_good"] - rewards["reward_bad"]} if len(rewards) == 2 else {}
        return {"loss": sums["examples"] / examples, "kl": sums["kl"] / examples, **margin, **rewards}


LARGEST_MEAN = -1e-6
"""Upper bound of mean log-probabilities m, because log(1 - e^m) has no finite gradient at m = 0."""


class OddsRatioPreference(PairObjective):
    """ORPO: the cross entropy of the chosen answers plus beta times -log sigmoid of the log odds ratio, without a
    reference model (Hong et al., arXiv 2403.07691).

    The cross entropy is the mean over the *answer* tokens of the chosen answers of the global batch, as in
    LLaMA-Factory. TRL 1.16 also counts the tokens of the prompts (experimental/orpo/orpo_trainer.py:799).
    """

    def __init__(self, section: OrpoObjective) -> None:
        super().__init__(section.name, beta=section.beta, pair_weight=section.beta, nll_weight=1.0)

    def scores(self, documents: DocumentLogProbs) -> torch.Tensor:
        """Log odds log(p / (1 - p)) of each answer, where log p is the mean log-probability of its tokens."""
        mean = per_token(documents.logp, documents).clamp(max=LARGEST_MEAN)
        return mean - torch.log(-torch.expm1(mean))

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Loss of each pair: -log sigmoid of its log odds ratio (equation 7 of the ORPO paper)."""
        return -logsigmoid(chosen - rejected)


class SimplePreference(PairObjective):
    """SimPO: -log sigmoid(beta x (difference of the answers' mean log-probabilities) - gamma), without a reference
    model (Meng et al., arXiv 2405.14734).
    """

    def __init__(self, section: SimpoObjective) -> None:
        super().__init__(section.name, beta=section.beta)
        self._gamma = section.gamma

    def scores(self, documents: DocumentLogProbs) -> torch.Tensor:
        """Mean log-probability of the tokens of each answer, in nats."""
        return per_token(documents.logp, documents)

    def pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Loss of each pair: equation 6 of the SimPO paper."""
        return -logsigmoid(self.beta * (chosen - rejected) - self._gamma)
