"""Kahneman-Tversky optimisation (Ethayarajh et al., arXiv 2402.01306)."""

from collections.abc import Mapping

import torch

from ds_finetune.config.objectives import KtoObjective
from ds_finetune.objectives.objective import DocumentLogProbs, DocumentObjective, LossAndSums, Term
from ds_finetune.objectives.pairs import log_ratios


class KahnemanTversky(DocumentObjective):
    """A loss of single answers that are marked as good (target 1) or bad (0), the mean over those of the global batch.

    An answer's gain is its log-ratio to the reference less z0, an estimate of the KL divergence from the reference:
    the mean log-ratio of prompts with another example's answer, over the *global* batch, and 0 at least.
    """

    terms = (Term("examples"),)
    sum_names = ("examples", "good", "bad", "reward_good", "reward_bad", "kl")

    def __init__(self, section: KtoObjective) -> None:
        self.name = section.name
        self.reference_from_adapters = section.reference == "adapters_off"
        self._section = section

    def loss(self, documents: DocumentLogProbs, weights: torch.Tensor, baseline: torch.Tensor) -> LossAndSums:
        """The weighted sum of 1 - sigmoid(beta x gain) of good answers and 1 - sigmoid(-beta x gain) of bad ones;
        `baseline` is z0.
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
        """z0 from the log-ratios of the mismatched answers of a global batch, in nats."""
        return max(0.0, log_ratio_sum / max(count, 1))

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The loss, z0 as `kl`, the mean rewards of good and of bad answers, and their difference.

        A reward is beta times the log-ratio to the reference. Without a good answer there is no `reward_good`, and the
        same for bad ones; the margin needs both.
        """
        examples = max(counts["examples"], 1)
        rewards = {f"reward_{side}": sums[f"reward_{side}"] / sums[side] for side in ("good", "bad") if sums[side]}
        margin = {"reward_margin": rewards["reward_good"] - rewards["reward_bad"]} if len(rewards) == 2 else {}
        return {"loss": sums["examples"] / examples, "kl": sums["kl"] / examples, **margin, **rewards}
