"""Group relative policy optimisation (GRPO): advantages and pass@k of sampled answers, and the loss of their tokens.

In formulas, `lp` is the log-probability of an answer token under the trained model, `old` under the weights that
sampled the answer, and `A` is the advantage of its answer; sg[...] stops the gradient. A loss is the negative of what
the papers maximise.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ds_finetune.config.objectives import GrpoObjective
from ds_finetune.objectives.objective import AnswerObjective, AnswerTokens, LossAndSums, Term

_ROUNDING = 8 * np.finfo(np.float64).eps
"""Relative difference up to which two rewards count as equal, because sums of weighted rewards are rounded."""


def has_spread(rewards: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether answers to a prompt differ in reward, bool [groups]. NaN in `rewards` [groups, size] is a missing one."""
    is_scored = ~np.isnan(rewards)
    top = np.where(is_scored, rewards, -np.inf).max(axis=1)
    bottom = np.where(is_scored, rewards, np.inf).min(axis=1)
    # For a group without rewards `bottom` is inf and `top` is -inf, so the result is False.
    return np.asarray(top - bottom > _ROUNDING * np.maximum(np.abs(top), np.abs(bottom)))


def advantages(rewards: NDArray[np.float64], how: Literal["mean", "mean_std", "leave_one_out"]) -> NDArray[np.float64]:
    """Advantages of sampled answers, fp64 [groups, size], from their `rewards` r, fp64 [groups, size]. A group has the
    answers to one prompt.

    `mean`: r - mean(r) (Dr. GRPO, arXiv 2503.20783). `mean_std`: (r - mean(r)) / std(r) (GRPO, arXiv 2402.03300), where
    the standard deviation divides by n - 1. `leave_one_out`: r minus the mean of the other answers' rewards, which is n
    / (n - 1) (r - mean(r)) (RLOO, arXiv 2402.14740).

    An answer whose reward is NaN has the advantage 0 and does not count in its group. If all rewards of a group are
    equal, its advantages are exactly 0.
    """
    result = np.zeros_like(rewards)
    for number in np.flatnonzero(has_spread(rewards)):
        is_scored = ~np.isnan(rewards[number])
        scored = rewards[number, is_scored]
        centred = scored - scored.mean()
        if how == "mean_std":
            centred /= scored.std(ddof=1)
        elif how == "leave_one_out":
            centred *= len(scored) / (len(scored) - 1)
        result[number, is_scored] = centred
    return result


def combine_rewards(
    parts: NDArray[np.float64], weights: NDArray[np.float64], how: Literal["sum", "each"]
) -> NDArray[np.float64]:
    """Total reward of each answer to a prompt, fp64 [answers], from the scores r of all reward functions, fp64
    [answers, rewards], and their `weights` w.

    `sum` is sum_k w_k r_k. `each` is sum_k w_k (r_k - mean(r_k)) / std(r_k), as in GDPO (arXiv 2601.05242) but without
    GDPO's normalisation over the batch; a reward function that gives all answers one score counts as 0. A NaN score
    (reward not applicable) is left out. An answer to which no reward applies gets NaN.
    """
    applies = ~np.isnan(parts)
    compared, factors = parts, weights
    if how == "each":
        compared, deviations = advantages(parts.T, "mean").T, np.ma.masked_invalid(parts).std(axis=0, ddof=1)
        factors = weights / np.where(has_spread(parts.T), deviations.filled(1.0), 1.0)
    total = np.where(applies, compared * factors, 0.0).sum(axis=1)
    # If the scores of several rewards cancel each other, totals differ only by rounding errors, which `mean_std` would
    # scale up to the size of real rewards. So all answers get one total.
    rounding = _ROUNDING * np.where(applies, np.abs(parts * factors), 0.0).sum(axis=1).max()
    scored = total[applies.any(axis=1)]
    if len(scored) and np.ptp(scored) <= rounding:
        total[:] = scored[0]
    return np.where(applies.any(axis=1), total, np.nan)


def pass_at(k: int, *, samples: int, right: int) -> float:
    """pass@k: unbiased estimate of the probability that one of k answers is right, if `right` of `samples` answers are:
    1 - C(samples - right, k) / C(samples, k) (Chen et al., arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def pass_shares(right: Sequence[int], *, samples: int) -> dict[str, NDArray[np.float64]]:
    """Metrics `sampled_pass_at_1` and `pass_at_K` of each prompt, [prompts] each, from its number of right answers. K
    is each power of two up to `samples`, and `samples` itself.
    """
    ks = {1, samples} | {2**power for power in range(samples.bit_length())}
    return {
        f"pass_at_{k}" if k > 1 else "sampled_pass_at_1": np.array(
            [pass_at(k, samples=samples, right=each) for each in right]
        )
        for k in sorted(ks)
    }


_PER_TOKEN = ("entropy", "ratio", "clipped_low", "clipped_high", "approx_kl")
"""Names of the metrics that are means over all answer tokens."""
_OTHER_SUMS = ("kl", "mismatch", "mismatch_weight", "mismatch_square", "advantage_abs")
_SUMS = ("loss", *_PER_TOKEN, *_OTHER_SUMS, "tokens_of_reference", "tokens_of_sampler")


class PolicyGradient(AnswerObjective):
    """Policy-gradient loss of answer tokens with a clipped importance ratio, and a KL penalty to a reference model.

    `aggregation` selects how the loss averages over G answers with n_i tokens each, N tokens in all, of the global
    batch. Over tokens: 1/N sum_i sum_t (DAPO, arXiv 2503.14476). Over answers: 1/G sum_i 1/n_i sum_t (GRPO, arXiv
    2402.03300). With a fixed length L: 1/(G L) sum_i sum_t (Dr. GRPO, arXiv 2503.20783).
    """

    name = "grpo"
    documents_per_unit = 1
    sum_names = _SUMS

    def __init__(self, section: GrpoObjective) -> None:
        self._section = section
        self.reference_is_start = section.reference == "start"
        self.terms = (Term("supervised_tokens"),) if section.aggregation == "token" else (Term("examples"),)
        if section.aggregation == "fixed":
            assert section.fixed_length is not None, "a run file fills it in"
            self.terms = (Term("examples", 1 / section.fixed_length),)

    def loss(self, tokens: AnswerTokens, weights: torch.Tensor) -> LossAndSums:
        """Contribution of answer tokens to the loss of the step, and sums over the tokens for the metrics."""
        scale = 1 / tokens.lengths if self._section.aggregation == "sequence" else torch.ones_like(tokens.lengths)
        old = tokens.logp.detach().where(tokens.old.isnan(), tokens.old)
        log_ratio = tokens.logp - old
        policy, clipped_low, clipped_high = self._policy(tokens, log_ratio)
        is_compared = ~tokens.reference.isnan()
        divergence = _k3(tokens.logp, tokens.reference.where(is_compared, tokens.logp.detach()))
        losses = policy
        if self._section.kl_weight:
            losses = losses + self._section.kl_weight * log_ratio.exp() * divergence
        difference = (old - tokens.sampled).nan_to_num(0.0)
        loss = (losses * self._sampler_weight(tokens, difference) * scale).sum()
        is_sampled, ratio = ~tokens.sampled.isnan(), log_ratio.detach().exp()
        sums = {
            "loss": loss,
            "entropy": tokens.entropy.sum(),
            "ratio": ratio.sum(),
            "clipped_low": clipped_low.sum(),
            "clipped_high": clipped_high.sum(),
            "approx_kl": (ratio - 1 - log_ratio).sum(),
            "kl": divergence.sum(),
            "mismatch": difference.abs().sum(),
            "mismatch_weight": difference.exp().where(is_sampled, 0).sum(),
            "mismatch_square": (2 * difference).exp().where(is_sampled, 0).sum(),
            "advantage_abs": (tokens.advantage.abs() / tokens.lengths).sum(),
            "tokens_of_reference": is_compared.sum(),
            "tokens_of_sampler": is_sampled.sum(),
        }
        return LossAndSums(loss * weights[0], torch.stack([sums[name].detach().double() for name in self.sum_names]))

    def _policy(self, tokens: AnswerTokens, log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Policy-gradient loss of each token, and two masks of tokens without gradient, whose ratio was clipped at the
        lower or at the upper bound.

        lp is a token's log-probability, old the one under the sampling weights, A the advantage of its answer, and
        sg stops the gradient. `token`: -min(rho A, clip(rho, 1 - low, 1 + high) A) with rho = exp(lp - old) (PPO's
        surrogate, as in GRPO and DAPO). With a dual clip c the loss is at most c |A| where A < 0 (arXiv 1912.09729).
        `sequence`: the same formula with s = exp(1/n sum_t (lp - old)) for all n tokens of an answer; its gradient is
        that of sg[s] exp(lp - sg[lp]) (GSPO, arXiv 2507.18071). `capped`: -sg[min(rho, cap)] A lp (CISPO, arXiv
        2506.13585).
        """
        section, advantage = self._section, tokens.advantage
        if section.ratio == "capped":
            assert section.ratio_cap is not None
            ratio = log_ratio.detach().exp()
            capped = ratio > section.ratio_cap
            return -ratio.clamp(max=section.ratio_cap) * advantage * tokens.logp, torch.zeros_like(capped), capped
        if section.ratio == "sequence":
            log_ratio = tokens.means(log_ratio.detach()) + tokens.logp - tokens.logp.detach()
        ratio = log_ratio.exp()
        low, high = 1 - section.clip_low, 1 + section.clip_high
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if section.dual_clip is not None:
            gain = gain.maximum(section.dual_clip * advantage.clamp(max=0))
        ratio = ratio.detach()
        return -gain, (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)

    def _sampler_weight(self, tokens: AnswerTokens, difference: torch.Tensor) -> torch.Tensor:
        """Weight of each token, which corrects for log-probabilities of the sampler that differ from those in training.

        The weight is min(exp(d), cap) with d = old - sampled, or 1 without a correction. With `geometric`, d is its
        mean over the answer, because a product over a long answer would be almost 0.
        """
        if self._section.mismatch == "none":
            return torch.ones_like(difference)
        difference = tokens.means(difference) if self._section.mismatch == "geometric" else difference
        return difference.exp().clamp(max=self._section.mismatch_cap)

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The loss, and means over the answer tokens of a step. Entropy and divergences are in nats; `advantage_abs` is
        a mean over answers.

        `kl` is the divergence from the reference model, and `mismatch` the mean difference to the sampler's
        log-probabilities; both are missing if unknown. `mismatch_ess` is the effective sample size as a fraction of the
        n tokens, (sum w)^2 / (n sum w^2), for weights w = exp(old - sampled). A step without answers has a loss of 0
        and no means over tokens.
        """
        (term,), tokens = self.terms, counts["supervised_tokens"]
        metrics = {"loss": term.weight * sums["loss"] / max(counts[term.unit], 1)}
        metrics |= {name: sums[name] / tokens for name in _PER_TOKEN if tokens}
        metrics["advantage_abs"] = sums["advantage_abs"] / max(counts["examples"], 1)
        if number := sums["tokens_of_reference"]:
            metrics["kl"] = sums["kl"] / number
        if number := sums["tokens_of_sampler"]:
            metrics["mismatch"] = sums["mismatch"] / number
            metrics["mismatch_ess"] = sums["mismatch_weight"] ** 2 / (number * sums["mismatch_square"])
        return metrics


def _k3(logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Schulman's estimate of KL(model || reference) for each token, exp(-d) - 1 + d with d = logp - reference, which is
    never negative (http://joschu.net/blog/kl-approx.html).

    Its gradient estimates the gradient of KL(reference || model). The product of the estimate and the ratio r =
    exp(logp - old) has the gradient r x d x (gradient of logp), which estimates the gradient of KL(model || reference)
    (DeepSeek-V3.2, arXiv 2512.02556).
    """
    difference = logp - reference
    return torch.expm1(-difference) + difference
