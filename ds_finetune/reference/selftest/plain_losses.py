"""The losses of the reference loop, implemented from the papers for the samples of one unit.

This module imports no objective of the program, so that an error in an objective shows as a difference.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ds_finetune.config.objectives import (
    ClassificationObjective,
    CpoObjective,
    DistillObjective,
    DpoObjective,
    GrpoObjective,
    KtoObjective,
    ObjectiveConfig,
    OrpoObjective,
    RewardObjective,
    SimpoObjective,
)

_LOG = torch.nn.functional.logsigmoid


class Answer(NamedTuple):
    """The answer of a sample, for objectives that compare answers."""

    logp: torch.Tensor
    """Log-probability of the answer in nats, summed over its supervised tokens, fp64 scalar."""
    tokens: int
    """Number of supervised tokens of the answer."""
    reference: float
    """Log-probability of the answer under the reference model, in nats."""
    target: float
    """1 for a good answer, 0 for a bad one."""

    @property
    def ratio(self) -> torch.Tensor:
        """Log-ratio of the answer: log p - log p_reference."""
        return self.logp - self.reference


class SampledTokens(NamedTuple):
    """A sampled answer: its advantage, and log-probabilities of its tokens in nats, each fp64 [tokens]."""

    logp: torch.Tensor
    old: torch.Tensor
    """Log-probabilities of the answer's tokens under the weights that sampled it."""
    sampled: torch.Tensor
    """Log-probabilities of the answer's tokens that the sampler reported."""
    reference: torch.Tensor
    advantage: float


def samples_per_unit(section: ObjectiveConfig) -> int:
    """Number of samples in a unit of the loss: 2 for objectives on pairs of answers, else 1."""
    return 2 if section.unit == "pairs" else 1


def answers_loss(section: ObjectiveConfig, answers: Sequence[Answer], z0: float) -> torch.Tensor:
    """Loss of an answer or a pair (chosen answer first), without the chosen answer's cross entropy."""
    w, r = answers[0], answers[-1]
    match section:
        case DpoObjective():
            return _dpo_loss(section, w, r)
        case SimpoObjective():
            # SimPO: Meng et al., arXiv 2405.14734, eq. 6
            return -_LOG(section.beta * (w.logp / w.tokens - r.logp / r.tokens) - section.gamma)
        case CpoObjective():
            return _cpo_loss(section, w, r)
        case OrpoObjective():
            # ORPO: Hong et al., arXiv 2403.07691, eq. 4, 6 and 7: odds(y) = P / (1 - P), P the geometric mean over
            # tokens
            p_w, p_r = torch.exp(w.logp / w.tokens), torch.exp(r.logp / r.tokens)
            return -section.beta * _LOG(torch.log(p_w / (1 - p_w)) - torch.log(p_r / (1 - p_r)))
        case KtoObjective():
            # KTO: Ethayarajh et al., arXiv 2402.01306, eq. 8: lambda - v(x, y)
            weight = section.desirable_weight if w.target else section.undesirable_weight
            margin = w.ratio - z0 if w.target else z0 - w.ratio
            return weight * (1 - torch.sigmoid(section.beta * margin))
    raise AssertionError(f"no formula for {section.name}")


def _dpo_loss(section: DpoObjective, w: Answer, r: Answer) -> torch.Tensor:
    beta, e = section.beta, section.label_smoothing
    difference = w.ratio - r.ratio
    if section.loss in {"ipo", "sigmoid_norm"}:
        difference = w.ratio / w.tokens - r.ratio / r.tokens
    margin = beta * difference
    match section.loss:
        case "sigmoid" | "sigmoid_norm":
            # DPO: Rafailov et al., arXiv 2305.18290, eq. 7. With label smoothing it is conservative DPO.
            return -(1 - e) * _LOG(margin) - e * _LOG(-margin)
        case "robust":
            # Robust DPO: Chowdhury et al., arXiv 2403.00409, eq. 9
            return (-(1 - e) * _LOG(margin) + e * _LOG(-margin)) / (1 - 2 * e)
        case "hinge":
            return torch.clamp(1 - margin, min=0)
        case "ipo":
            # IPO: Azar et al., arXiv 2310.12036, eq. 17, with log-probabilities averaged over tokens
            return (difference - 1 / (2 * beta)) ** 2
        case "apo_zero":
            # APO: D'Oosterlinck et al., arXiv 2408.06266
            return 1 - torch.sigmoid(beta * w.ratio) + torch.sigmoid(beta * r.ratio)
        case "apo_down":
            return torch.sigmoid(beta * w.ratio) + 1 - torch.sigmoid(margin)


def _cpo_loss(section: CpoObjective, w: Answer, r: Answer) -> torch.Tensor:
    margin = section.beta * (w.logp - r.logp)
    match section.loss:
        case "sigmoid":
            # CPO: Xu et al., arXiv 2401.08417, eq. 5
            return -_LOG(margin)
        case "hinge":
            return torch.clamp(1 - margin, min=0)
        case "ipo":
            return (w.logp / w.tokens - r.logp / r.tokens - 1 / (2 * section.beta)) ** 2


def sampled_loss(section: GrpoObjective, answer: SampledTokens, counts: Mapping[str, int]) -> torch.Tensor:
    """Contribution of a sampled answer to the mean loss over all answers."""
    losses = _policy_losses(section, answer)
    # The KL estimator k3 (Schulman, 2020) times the probability ratio (DeepSeek-V3.2, arXiv 2512.02556)
    log_ratio = answer.reference - answer.logp
    losses = losses + section.kl_weight * torch.exp(answer.logp - answer.old) * (torch.exp(log_ratio) - log_ratio - 1)
    mismatch = answer.old - answer.sampled
    if section.mismatch != "none":
        mismatch = mismatch if section.mismatch == "token" else mismatch.mean().expand(len(mismatch))
        losses = losses * torch.clamp(torch.exp(mismatch), max=section.mismatch_cap)
    match section.aggregation:
        case "token":
            # Mean over all tokens, as in DAPO, arXiv 2503.14476
            return losses.sum() / counts["supervised_tokens"]
        case "sequence":
            # Mean over answers of the mean over tokens, as in GRPO, arXiv 2402.03300
            return losses.mean() / counts["units"]
        case "fixed":
            # Sum over tokens divided by a fixed length, as in Dr. GRPO, arXiv 2503.20783
            assert section.fixed_length is not None
            return losses.sum() / (counts["units"] * section.fixed_length)


def _policy_losses(section: GrpoObjective, answer: SampledTokens) -> torch.Tensor:
    a, ratio = answer.advantage, torch.exp(answer.logp - answer.old)
    match section.ratio:
        case "capped":
            # CISPO, arXiv 2506.13585, caps the probability ratio
            return -torch.clamp(ratio.detach(), max=section.ratio_cap) * a * answer.logp
        case "sequence":
            # GSPO, arXiv 2507.18071, has one probability ratio per answer
            ratio = torch.exp((answer.logp - answer.old).mean()).expand(len(ratio))
    gain = torch.minimum(ratio * a, torch.clamp(ratio, 1 - section.clip_low, 1 + section.clip_high) * a)
    return -(torch.clamp(gain, min=section.dual_clip * a) if section.dual_clip and a < 0 else gain)


def score_loss(section: ObjectiveConfig, scores: torch.Tensor, targets: list[float]) -> torch.Tensor:
    """Loss of a text or pair from its scores [samples, outputs]: cross entropy, squared error, or Bradley-Terry."""
    scores = scores.double()
    match section:
        case RewardObjective():
            w, r = scores[:, 0]
            return torch.log1p(torch.exp(-(w - r - targets[0]))) + section.center_weight * (w + r) ** 2
        case ClassificationObjective() if scores.shape[1] == 1:
            return (scores[0, 0] - targets[0]) ** 2
        case ClassificationObjective():
            logp, e = torch.log_softmax(scores[0], dim=0), section.label_smoothing
            return -(1 - e) * logp[int(targets[0])] - e * logp.mean()
    raise AssertionError(f"no formula for {section.name}")


def distill_loss(
    section: DistillObjective, logits: torch.Tensor, labels: torch.Tensor, log_q: torch.Tensor, ids: torch.Tensor | None
) -> torch.Tensor:
    """Distillation loss of a sample, T^2 x KL(q || p) summed over supervised tokens (arXiv 1503.02531, section 2).

    `logits` is [tokens, vocabulary], `labels` [tokens]. `log_q` are the teacher's log-probabilities at the temperature.
    They cover the vocabulary or, with `ids` [tokens, k], these k tokens and a last value for all other tokens.
    """
    log_p = torch.log_softmax(logits / section.temperature, dim=-1)
    if ids is not None:
        # Probabilities stored in fp16 do not sum to 1, so they are normalised.
        log_q = torch.log_softmax(log_q, dim=-1)
        others = log_p.scatter(1, ids, float("-inf")).logsumexp(-1, keepdim=True)
        log_p = torch.cat([log_p.gather(1, ids), others], dim=-1)
    divergence = (log_q.exp() * (log_q - log_p)).sum()
    cross_entropy = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return section.label_weight * cross_entropy + (1 - section.label_weight) * section.temperature**2 * divergence
