"""Objectives on pairs and on marked answers, compared with formulas written out one answer at a time."""

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter

from ds_finetune.config.objectives import ObjectiveField
from ds_finetune.objectives.objective import DocumentLogProbs, DocumentObjective, Unit, make_objective

Answer = tuple[float, int, float]
"""Log-probability, number of tokens, log-probability of the reference."""
SMOOTHED = {"label_smoothing": 0.1}
PAIRS: tuple[Answer, ...] = (
    (-7.0, 4, -9.5), (-12.0, 9, -11.0), (-3.25, 1, -3.0), (-40.0, 30, -44.0), (-2.5, 5, -2.5), (-2.5, 5, -2.5),
    (-1000.0, 900, -990.0), (-1200.0, 1024, -1180.0),
)  # fmt: skip


def make(name: str, **keys: object) -> DocumentObjective:
    objective = make_objective(TypeAdapter(ObjectiveField).validate_python({"name": name, **keys}))
    assert isinstance(objective, DocumentObjective)
    return objective


def documents(answers: Sequence[Answer], targets: Sequence[float] = ()) -> DocumentLogProbs:
    logp, tokens, reference = (torch.tensor(column, dtype=torch.float64) for column in zip(*answers, strict=True))
    target = torch.tensor(targets or [0.0] * len(answers), dtype=torch.float64)
    return DocumentLogProbs(logp.requires_grad_(), tokens, target, reference)


def evaluated(objective: DocumentObjective, docs: DocumentLogProbs, baseline: float = 0.0) -> dict[str, float]:
    """Metrics of one forward that is the global batch, whose loss must be the one with a gradient."""
    pairs, chosen = len(docs.logp) / 2, float(docs.num_tokens[::2].sum())
    counts = {"pairs": pairs, "examples": float(len(docs.logp)), "chosen_tokens": chosen, "supervised_tokens": math.nan}
    weights = torch.tensor([term.weight / counts[term.unit] for term in objective.terms], dtype=torch.float64)
    loss, sums, _ = objective.loss(docs, weights, torch.tensor(baseline, dtype=torch.float64))
    metrics = objective.metrics(dict(zip(objective.sum_names, sums.tolist(), strict=True)), counts)
    assert not sums.requires_grad
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-12)
    return metrics


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def dpo(variant: str, w: Answer, r: Answer, *, b: float = 0.1, e: float = 0.0) -> float:
    gain_w, gain_r = w[0] - w[2], r[0] - r[2]
    d, per_token = gain_w - gain_r, gain_w / w[1] - gain_r / r[1]
    return {
        "sigmoid": lambda: -(1 - e) * log_sigmoid(b * d) - e * log_sigmoid(-b * d),
        "robust": lambda: (-(1 - e) * log_sigmoid(b * d) + e * log_sigmoid(-b * d)) / (1 - 2 * e),
        "hinge": lambda: max(0.0, 1 - b * d),
        "ipo": lambda: (per_token - 1 / (2 * b)) ** 2,
        "apo_zero": lambda: 1 - sigmoid(b * gain_w) + sigmoid(b * gain_r),
        "apo_down": lambda: sigmoid(b * gain_w) + 1 - sigmoid(b * d),
        "sigmoid_norm": lambda: -log_sigmoid(b * per_token),
    }[variant]()


def cpo(variant: str, w: Answer, r: Answer, *, b: float = 0.1) -> float:
    d = w[0] - r[0]
    if variant == "ipo":
        return (w[0] / w[1] - r[0] / r[1] - 1 / (2 * b)) ** 2
    return max(0.0, 1 - b * d) if variant == "hinge" else -log_sigmoid(b * d)


def simpo(w: Answer, r: Answer, *, b: float, g: float) -> float:
    return -log_sigmoid(b * (w[0] / w[1] - r[0] / r[1]) - g)


def orpo(w: Answer, r: Answer, *, b: float) -> float:
    log_odds = [m - math.log(-math.expm1(m)) for m in (w[0] / w[1], r[0] / r[1])]
    return -b * log_sigmoid(log_odds[0] - log_odds[1])


def nll(answers: Sequence[Answer]) -> float:
    """Over the tokens of all chosen answers, not pair by pair."""
    return -sum(answer[0] for answer in answers[::2]) / sum(answer[1] for answer in answers[::2])


Loss = Callable[[Answer, Answer], float]
CASES: dict[str, tuple[dict[str, Any], Loss, float]] = {
    **{
        f"dpo {variant}": ({"name": "dpo", "loss": variant}, lambda w, r, v=variant: dpo(v, w, r), 0.0)
        for variant in ("sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "sigmoid_norm")
    },
    "dpo smoothed": ({"name": "dpo", **SMOOTHED}, lambda w, r: dpo("sigmoid", w, r, e=0.1), 0.0),
    "dpo robust smoothed": (
        {"name": "dpo", "loss": "robust", **SMOOTHED}, lambda w, r: dpo("robust", w, r, e=0.1), 0.0
    ),
    "dpo with nll": ({"name": "dpo", "beta": 0.3, "nll_weight": 0.2}, lambda w, r: dpo("sigmoid", w, r, b=0.3), 0.2),
    "simpo": ({"name": "simpo", "beta": 2.5, "gamma": 1.0}, lambda w, r: simpo(w, r, b=2.5, g=1.0), 0.0),
    **{
        f"cpo {variant}": ({"name": "cpo", "loss": variant}, lambda w, r, v=variant: cpo(v, w, r), 1.0)
        for variant in ("sigmoid", "hinge", "ipo")
    },
    "cpo without nll": ({"name": "cpo", "nll_weight": 0.0}, lambda w, r: cpo("sigmoid", w, r), 0.0),
    "orpo": ({"name": "orpo", "beta": 0.25}, lambda w, r: orpo(w, r, b=0.25), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_of_pairs_is_the_formula(case: str) -> None:
    keys, formula, nll_weight = CASES[case]
    metrics = evaluated(make(**keys), documents(PAIRS))
    pairs = list(zip(PAIRS[::2], PAIRS[1::2], strict=True))
    expected = sum(formula(chosen, rejected) for chosen, rejected in pairs) / len(pairs)
    assert metrics["loss"] == pytest.approx(expected + nll_weight * nll(PAIRS), rel=1e-12)
    assert metrics.get("nll") == (pytest.approx(nll(PAIRS), rel=1e-12) if nll_weight else None)
    assert metrics["logp_chosen"] == pytest.approx(sum(answer[0] for answer in PAIRS[::2]) / len(pairs))


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_pairs_is_that_of_finite_differences(case: str) -> None:
    objective, docs = make(**CASES[case][0]), documents(PAIRS[:4])
    weights = torch.tensor([0.7, 0.03][: len(objective.terms)], dtype=torch.float64)

    def loss(logp: torch.Tensor) -> torch.Tensor:
        return objective.loss(docs._replace(logp=logp), weights, torch.zeros((), dtype=torch.float64)).loss

    assert torch.autograd.gradcheck(loss, docs.logp)


@pytest.mark.parametrize("case", CASES)
def test_swapped_sides_negate_the_margin(case: str) -> None:
    objective = make(**CASES[case][0])
    pair, swapped = documents(PAIRS[:2]), documents(PAIRS[1::-1])
    one, other = evaluated(objective, pair), evaluated(objective, swapped)
    assert one["reward_margin"] == pytest.approx(-other["reward_margin"], rel=1e-12)
    assert one["reward_margin"] != 0
    assert one["reward_accuracy"] + other["reward_accuracy"] == 1
    assert one["reward_margin"] == pytest.approx(one["reward_chosen"] - one["reward_rejected"])


@pytest.mark.parametrize("case", CASES)
def test_equal_sides_have_opposite_gradients_and_are_no_win(case: str) -> None:
    objective, docs = make(**CASES[case][0]), documents((PAIRS[4], PAIRS[4]))
    metrics = evaluated(objective, docs)
    assert (metrics["reward_margin"], metrics["reward_accuracy"]) == (0, 0)
    weights = torch.tensor([1.0, 0.0][: len(objective.terms)], dtype=torch.float64)
    objective.loss(docs, weights, torch.zeros(())).loss.backward()
    assert docs.logp.grad is not None
    # APO is the only variant that is not a function of the difference.
    assert "apo" in case or docs.logp.grad.sum().item() == 0


def test_first_loss_of_dpo_is_log_2() -> None:
    for keys in ({}, SMOOTHED, {"loss": "robust", **SMOOTHED}, {"loss": "sigmoid_norm"}):
        docs = documents([(logp, tokens, logp) for logp, tokens, _ in PAIRS])
        assert evaluated(make("dpo", **keys), docs)["loss"] == pytest.approx(math.log(2), abs=1e-15)


def test_orpo_is_finite_for_answers_of_probability_one() -> None:
    for sure in (0.0, -1e-8, -1e-30):
        docs = documents(((sure, 1, 0.0), (-3.0, 2, 0.0), (-3.0, 2, 0.0), (sure, 1, 0.0)))
        evaluated(make("orpo"), docs)
        make("orpo").loss(docs, torch.ones(2, dtype=torch.float64), torch.zeros(())).loss.backward()
        assert docs.logp.grad is not None
        assert torch.isfinite(docs.logp.grad).all()


@pytest.mark.parametrize("name", ["dpo", "cpo"])
def test_a_pair_with_an_impossible_rejected_answer_costs_nothing(name: str) -> None:
    scores = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-math.inf], dtype=torch.float64)
    assert make(name).pair_losses(*scores).tolist() == [0.0]


@pytest.mark.parametrize("case", CASES)
def test_no_answer_gives_an_infinite_number(case: str) -> None:
    """Very long answers, answers without tokens, and a reference far away."""
    answers = ((-1e5, 8192, -1.0), (-1.0, 1, -1e5), (0.0, 0, 0.0), (-1e5, 8192, -1e5), (-5.0, 3, -4.0), (0.0, 0, 0.0))
    objective, docs = make(**CASES[case][0]), documents(answers)
    evaluated(objective, docs)
    out = objective.loss(docs, torch.ones(len(objective.terms), dtype=torch.float64), torch.zeros(()))
    out.loss.backward()
    assert docs.logp.grad is not None
    assert torch.isfinite(torch.cat([docs.logp.grad, out.sums])).all()


def test_a_forward_without_a_pair_gives_zeros() -> None:
    for case in CASES.values():
        objective, docs = make(**case[0]), documents(PAIRS)
        none = DocumentLogProbs(*(column[:0] for column in docs))
        loss, sums, _ = objective.loss(none, torch.ones(len(objective.terms), dtype=torch.float64), torch.zeros(()))
        assert (loss.item(), sums.abs().sum().item()) == (0, 0)
        assert loss.requires_grad
        assert not any(objective.metrics(dict.fromkeys(objective.sum_names, 0.0), no_units()).values())


def no_units() -> dict[str, float]:
    return dict.fromkeys(get_args(Unit), 0.0)


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_batch_add_up_to_the_whole(case: str) -> None:
    objective, weights = make(**CASES[case][0]), torch.tensor([0.25, 0.01], dtype=torch.float64)
    zero, docs = torch.zeros((), dtype=torch.float64), documents(PAIRS)
    weights = weights[: len(objective.terms)]
    whole = objective.loss(docs, weights, zero)
    parts = [
        objective.loss(DocumentLogProbs(*(column[part] for column in docs)), weights, zero)
        for part in (slice(0, 2), slice(2, 8))
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    assert sum(part.sums for part in parts).tolist() == pytest.approx(whole.sums.tolist(), rel=1e-12)


MARKED: tuple[Answer, ...] = ((-7.0, 4, -9.5), (-12.0, 9, -11.0), (-30.0, 20, -10.0), (-1000.0, 800, -990.0))
MARKS = (1.0, 0.0, 1.0, 0.0)


def kto(answer: Answer, mark: float, z0: float) -> float:
    r = answer[0] - answer[2]
    if mark:
        return 1.5 * (1 - sigmoid(0.1 * (r - z0)))
    return 0.75 * (1 - sigmoid(0.1 * (z0 - r)))


@pytest.mark.parametrize("z0", [0.0, 2.5])
def test_kto_is_the_formula(z0: float) -> None:
    objective = make("kto", desirable_weight=1.5, undesirable_weight=0.75)
    metrics = evaluated(objective, documents(MARKED, MARKS), baseline=z0)
    expected = sum(kto(answer, mark, z0) for answer, mark in zip(MARKED, MARKS, strict=True)) / 4
    assert metrics["loss"] == pytest.approx(expected, rel=1e-12)
    assert metrics["kl"] == pytest.approx(z0)
    assert metrics["reward_good"] == pytest.approx(0.1 * (2.5 - 20) / 2)
    assert metrics["reward_bad"] == pytest.approx(0.1 * (-1 - 10) / 2)
    assert metrics["reward_margin"] == pytest.approx(metrics["reward_good"] - metrics["reward_bad"])


def test_kto_has_the_gradient_of_finite_differences() -> None:
    objective, docs = make("kto", beta=0.3), documents(MARKED, MARKS)

    def loss(logp: torch.Tensor) -> torch.Tensor:
        return objective.loss(docs._replace(logp=logp), torch.ones(1), torch.tensor(0.5)).loss

    assert torch.autograd.gradcheck(loss, docs.logp)


def test_kto_starts_at_half_of_the_weights() -> None:
    equal = [(logp, tokens, logp) for logp, tokens, _ in MARKED]
    assert evaluated(make("kto"), documents(equal, MARKS))["loss"] == pytest.approx(0.5)


def test_kto_has_no_reward_of_answers_that_are_missing() -> None:
    metrics = evaluated(make("kto"), documents(MARKED[:2], (1.0, 1.0)))
    assert set(metrics) == {"loss", "kl", "reward_good"}


def test_z0_is_a_mean_and_never_negative() -> None:
    objective = make("kto")
    assert objective.baseline(6.0, 4) == 1.5
    assert objective.baseline(-6.0, 4) == 0
    assert objective.baseline(0.0, 0) == 0
