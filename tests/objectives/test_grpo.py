"""Advantages, and the loss of answer tokens on given log-probabilities against formulas written out for one answer."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ds_finetune.config.objectives import GrpoObjective
from ds_finetune.objectives.grpo import PolicyGradient, advantages, has_spread
from ds_finetune.objectives.objective import AnswerTokens, LossAndSums

HOW = ("mean", "mean_std", "leave_one_out")
NAN = math.nan


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("reward", "size"), [*product((0.1, 0.3, 0.35, 0.7, 1 / 3, 1.1, 1e9), (2, 7, 8, 16))])
def test_equal_rewards_have_no_advantage(how: Any, reward: float, size: int) -> None:
    """In other programs their mean is rounded, and what is left is divided by a standard deviation as small."""
    assert not advantages(np.full((1, size), reward), how).any()


def test_weighted_sums_that_are_equal_on_paper_have_no_spread() -> None:
    rewards = np.array([[0.1 + 0.2, 0.3, 0.3, 0.3], [0.3, 0.3, 0.3, 0.3 + 1e-9]])
    assert rewards[0].max() > rewards[0].min()
    assert has_spread(rewards).tolist() == [False, True]


def test_advantages_are_those_of_the_papers() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1, 2, 3, 4, 5, 6, 7, 8]])
    mean, std, others = (advantages(rewards, how) for how in HOW)  # type: ignore[arg-type]
    assert mean[0].tolist() == [0.875, *[-0.125] * 7]
    assert std[0, 0] == pytest.approx(2.4749, abs=1e-4)
    assert others[1] == pytest.approx([reward - (36 - reward) / 7 for reward in rewards[1]])
    assert std[1] == pytest.approx((rewards[1] - 4.5) / np.std(rewards[1], ddof=1))


@pytest.mark.parametrize("how", HOW)
def test_an_answer_without_a_reward_does_not_count(how: Any) -> None:
    rewards = np.array([[1.0, NAN, 0.0, 0.0], [NAN, 5.0, NAN, NAN], [NAN] * 4, [2.0, NAN, 2.0, NAN]])
    found = advantages(rewards, how)
    assert has_spread(rewards).tolist() == [True, False, False, False]
    assert found[0, [0, 2, 3]] == pytest.approx(advantages(np.array([[1.0, 0.0, 0.0]]), how)[0])
    # A single reward is not an advantage.
    assert found[0, 1] == 0
    assert not found[1:].any()


class Answer(NamedTuple):
    """Log-probabilities of the tokens of an answer, and its advantage."""

    advantage: float
    old: Sequence[float]
    reference: Sequence[float]
    sampled: Sequence[float]


def answers() -> list[Answer]:
    rng = np.random.default_rng(3)
    found = []
    for length, advantage in ((3, 0.7), (1, -1.2), (12, 0.0), (7, -0.4), (5, 1.5)):
        old, reference, sampled = (-rng.uniform(0.1, 3.0, length) for _ in range(3))
        found.append(Answer(advantage, old.tolist(), reference.tolist(), (old + (sampled - old) * 0.3).tolist()))
    return found


def logps(scale: float) -> list[torch.Tensor]:
    """Of the trained model, `scale` times as far from the old one as most ratios are clipped."""
    rng = np.random.default_rng(4)
    moved = [np.array(answer.old) + scale * rng.normal(size=len(answer.old)) for answer in answers()]
    return [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in moved]


def _value(number: torch.Tensor | float) -> float:
    return number.item() if isinstance(number, torch.Tensor) else number


def plain(section: GrpoObjective, answer: Answer, logp: torch.Tensor) -> torch.Tensor:
    """The loss of each token of an answer, token by token."""
    old, reference, sampled = (torch.tensor(each, dtype=torch.float64) for each in answer[1:])
    rho, losses = (logp - old).exp(), []
    of_answer = ((logp - old).sum() / len(logp)).exp()
    for t in range(len(logp)):
        ratio = of_answer if section.ratio == "sequence" else rho[t]
        a = answer.advantage
        if section.ratio == "capped":
            assert section.ratio_cap is not None
            gain = min(ratio.item(), section.ratio_cap) * a * logp[t]
        else:
            gain = min(ratio * a, min(max(ratio, 1 - section.clip_low), 1 + section.clip_high) * a, key=_value)
        if section.dual_clip is not None and a < 0:
            gain = max(gain, torch.tensor(section.dual_clip * a, dtype=torch.float64), key=_value)
        d = reference[t] - logp[t]
        loss = -gain + section.kl_weight * (d.exp() - 1 - d) * rho[t]
        if section.mismatch == "token":
            loss = loss * min(math.exp(old[t] - sampled[t]), section.mismatch_cap)
        elif section.mismatch == "geometric":
            loss = loss * min(math.exp((old - sampled).mean()), section.mismatch_cap)
        losses.append(loss)
    return torch.stack(losses)


def mean(section: GrpoObjective, losses: Sequence[torch.Tensor]) -> torch.Tensor:
    if section.aggregation == "token":
        return torch.cat(list(losses)).mean()
    if section.aggregation == "sequence":
        return torch.stack([each.mean() for each in losses]).mean()
    assert section.fixed_length is not None
    return torch.stack([each.sum() for each in losses]).sum() / (len(losses) * section.fixed_length)


def tokens_of(given: Sequence[Answer], logp: Sequence[torch.Tensor]) -> AnswerTokens:
    index = torch.repeat_interleave(torch.arange(len(given)), torch.tensor([len(each) for each in logp]))
    lengths = torch.bincount(index).double()

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([number for answer in given for number in getattr(answer, name)], dtype=torch.float64)

    def means(values: torch.Tensor) -> torch.Tensor:
        assert not values.requires_grad
        return (torch.zeros(len(given), dtype=torch.float64).index_add(0, index, values) / lengths)[index]

    return AnswerTokens(
        logp=torch.cat(list(logp)),
        entropy=torch.ones(len(index), dtype=torch.float64),
        advantage=torch.tensor([answer.advantage for answer in given], dtype=torch.float64)[index],
        lengths=lengths[index],
        old=flat("old"),
        reference=flat("reference"),
        sampled=flat("sampled"),
        means=means,
    )


def counts(given: Sequence[Answer]) -> dict[str, float]:
    return {"supervised_tokens": sum(len(answer.old) for answer in given), "examples": len(given)}


def ours(
    section: GrpoObjective, given: Sequence[Answer], logp: Sequence[torch.Tensor], every: Any = None
) -> LossAndSums:
    objective = PolicyGradient(section)
    (term,) = objective.terms
    weights = torch.tensor([term.weight / counts(every or given)[term.unit]], dtype=torch.float64)
    return objective.loss(tokens_of(given, logp), weights)


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"dual_clip": 1.3},
    {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.07},
    {"ratio": "capped", "ratio_cap": 1.1},
    {"kl_weight": 0.2},
    {"mismatch": "token", "mismatch_cap": 1.1, "kl_weight": 0.1},
    {"mismatch": "geometric", "ratio": "sequence", "mismatch_cap": 1.05},
)
MEANS: tuple[dict[str, Any], ...] = (
    {"aggregation": "token"},
    {"aggregation": "sequence"},
    {"aggregation": "fixed", "fixed_length": 20},
)


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("aggregation", MEANS, ids=lambda keys: keys["aggregation"])
@pytest.mark.parametrize("keys", VARIANTS, ids=lambda keys: "-".join(map(str, keys.values())) or "default")
def test_loss_and_gradients_equal_a_plain_loop(keys: dict[str, Any], aggregation: dict[str, Any], scale: float) -> None:
    section, given = GrpoObjective(name="grpo", **keys, **aggregation), answers()
    mine, theirs = logps(scale), logps(scale)
    wanted = mean(section, [plain(section, answer, logp) for answer, logp in zip(given, theirs, strict=True)])
    found = ours(section, given, mine)
    wanted.backward()
    found.loss.backward()
    assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    for one, other in zip(mine, theirs, strict=True):
        assert one.grad == pytest.approx(other.grad, rel=1e-11, abs=1e-15)
    objective = PolicyGradient(section)
    sums = dict(zip(objective.sum_names, found.sums.tolist(), strict=True))
    assert objective.metrics(sums, counts(given))["loss"] == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parametrize("aggregation", MEANS, ids=lambda keys: keys["aggregation"])
def test_parts_of_a_batch_add_up_to_it(aggregation: dict[str, Any]) -> None:
    section, given = GrpoObjective(name="grpo", ratio="sequence", clip_low=0.05, **aggregation), answers()
    whole, parts = logps(0.3), logps(0.3)
    ours(section, given, whole).loss.backward()
    for start, end in ((0, 1), (1, 4), (4, 5)):
        ours(section, given[start:end], parts[start:end], given).loss.backward()
    for one, other in zip(whole, parts, strict=True):
        assert one.grad == pytest.approx(other.grad, rel=1e-12)


@pytest.mark.parametrize("aggregation", MEANS, ids=lambda keys: keys["aggregation"])
@pytest.mark.parametrize("ratio", [{"ratio": "token"}, {"ratio": "sequence"}, {"ratio": "capped", "ratio_cap": 5.0}])
def test_on_policy_is_reinforce(ratio: dict[str, Any], aggregation: dict[str, Any]) -> None:
    """Without old log-probabilities each ratio is exactly 1, and the gradient that of -A log p in the mean."""
    section, given = (
        GrpoObjective(name="grpo", **ratio, **aggregation),
        [answer._replace(old=[NAN] * len(answer.old)) for answer in answers()],
    )
    logp, plain_logp = logps(0.3), logps(0.3)
    found = ours(section, given, logp)
    found.loss.backward()
    mean(section, [-answer.advantage * each for answer, each in zip(given, plain_logp, strict=True)]).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(logp, plain_logp, strict=True):
        assert one.grad == pytest.approx(other.grad, rel=1e-14)
    objective = PolicyGradient(section)
    metrics = objective.metrics(dict(zip(objective.sum_names, found.sums.tolist(), strict=True)), counts(given))
    assert (metrics["ratio"], metrics["clipped_low"], metrics["clipped_high"], metrics["approx_kl"]) == (1, 0, 0, 0)


def test_a_ratio_of_answers_equals_the_mean_of_answers_on_policy() -> None:
    """GSPO's gradient is that of GRPO's mean over answers where the model has not moved."""
    one, other = logps(0.0), logps(0.0)
    ours(GrpoObjective(name="grpo", aggregation="sequence", ratio="sequence"), answers(), one).loss.backward()
    ours(GrpoObjective(name="grpo", aggregation="sequence"), answers(), other).loss.backward()
    for mine, theirs in zip(one, other, strict=True):
        assert mine.grad == pytest.approx(theirs.grad, rel=1e-12)


def test_metrics() -> None:
    objective, given, logp = PolicyGradient(GrpoObjective(name="grpo")), answers(), logps(0.3)
    found = ours(GrpoObjective(name="grpo"), given, logp)
    metrics = objective.metrics(dict(zip(objective.sum_names, found.sums.tolist(), strict=True)), counts(given))
    every = [
        (answer.advantage, *numbers)
        for answer, new in zip(given, logp, strict=True)
        for numbers in zip(new.tolist(), answer.old, answer.reference, answer.sampled, strict=True)
    ]
    ratios = [math.exp(new - old) for _, new, old, _, _ in every]
    weights = [math.exp(old - sampled) for _, _, old, _, sampled in every]
    n = len(every)
    wanted = {
        "entropy": 1.0,
        "ratio": sum(ratios) / n,
        "clipped_low": sum(r < 0.8 and a < 0 for r, (a, *_) in zip(ratios, every, strict=True)) / n,
        "clipped_high": sum(r > 1.28 and a > 0 for r, (a, *_) in zip(ratios, every, strict=True)) / n,
        "approx_kl": sum(r - 1 - math.log(r) for r in ratios) / n,
        "kl": sum(math.exp(ref - new) - 1 - (ref - new) for _, new, _, ref, _ in every) / n,
        "mismatch": sum(abs(old - sampled) for _, _, old, _, sampled in every) / n,
        "mismatch_ess": sum(weights) ** 2 / (n * sum(w * w for w in weights)),
        "advantage_abs": sum(abs(answer.advantage) for answer in given) / len(given),
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)
    assert min(metrics["clipped_low"], metrics["clipped_high"], 1 - metrics["mismatch_ess"]) > 0
    absent = [answer._replace(**dict.fromkeys(("reference", "sampled"), [NAN] * len(answer.old))) for answer in given]
    sums = ours(GrpoObjective(name="grpo"), absent, logp).sums.tolist()
    without = objective.metrics(dict(zip(objective.sum_names, sums, strict=True)), counts(given))
    assert set(metrics) - set(without) == {"kl", "mismatch", "mismatch_ess"}
    assert all(math.isfinite(number) for number in without.values())
    empty = objective.metrics(dict.fromkeys(objective.sum_names, 0.0), {"supervised_tokens": 0, "examples": 0})
    assert empty == {"loss": 0.0, "advantage_abs": 0.0}


def _divergence_gradient(loss: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor], is_on_policy: bool) -> float:
    """Relative error of the expected gradient of a loss of one token, enumerated, as that of KL(model || reference)."""
    generator = torch.Generator().manual_seed(0)
    logits, reference, other = (2 * torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    logp = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((logp.exp() * (logp - reference.log_softmax(0))).sum(), logits, retain_graph=True)
    old = logp.detach() if is_on_policy else other.log_softmax(0)
    expected = sum(old[token].exp() * loss(logp[token], old[token], token) for token in range(7))
    (found,) = torch.autograd.grad(expected, logits)  # type: ignore[arg-type]
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("is_on_policy", [True, False])
def test_the_divergence_has_an_unbiased_gradient(is_on_policy: bool) -> None:
    """Of k3 times the ratio, on and off policy; k3 alone is biased, as it is in other programs."""
    generator = torch.Generator().manual_seed(0)
    torch.randn(7, generator=generator, dtype=torch.float64)
    reference = (2 * torch.randn(7, generator=generator, dtype=torch.float64)).log_softmax(0)
    section = GrpoObjective(name="grpo", kl_weight=1.0)

    def loss(logp: torch.Tensor, old: torch.Tensor, token: int) -> torch.Tensor:
        answer = Answer(0.0, [old.item()], [reference[token].item()], [NAN])
        return ours(section, [answer], [logp[None]]).loss

    def k3_alone(logp: torch.Tensor, old: torch.Tensor, token: int) -> torch.Tensor:
        return (reference[token] - logp).exp() - 1 - (reference[token] - logp)

    assert _divergence_gradient(loss, is_on_policy) < 1e-12
    assert _divergence_gradient(k3_alone, is_on_policy) > 0.1
