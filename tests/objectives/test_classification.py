"""Metrics of classification and regression against scikit-learn and scipy, from sums of batches that are split."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sklearn_metrics
from torch.nn import functional

from ds_finetune.config.objectives import ClassificationObjective, RewardObjective
from ds_finetune.objectives.objective import ScoreObjective, make_objective
from ds_finetune.objectives.scores import Classification, Regression, Reward

ONE = torch.ones(1, dtype=torch.float64)


def metrics_of(objective: ScoreObjective, scores: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """The metrics of documents that come in forwards of 1, 4, 1, 4 ... units."""
    sums, size, done = Counter[str](), objective.documents_per_unit, 0
    for number in range(len(scores)):
        part = slice(done, done + size * (1 if number % 2 else 4))
        if part.start >= len(scores):
            break
        found = objective.loss(scores[part], targets[part], ONE)
        sums.update(dict(zip(objective.sum_names, found.sums.tolist(), strict=True)))
        done = part.stop
    units = len(scores) // size
    return objective.metrics(sums, {"examples": units, "pairs": units})


@pytest.mark.parametrize(("labels", "absent"), [(2, 0), (3, 0), (5, 2)])
def test_class_metrics_equal_those_of_scikit_learn(labels: int, absent: int) -> None:
    rng = np.random.default_rng(labels)
    true = rng.integers(labels - absent, size=90)
    scores = torch.from_numpy(rng.normal(size=(90, labels)))
    scores[torch.arange(60), torch.from_numpy(true)[:60]] += 1.5
    if absent:
        scores[:, -1] = -9
    objective = Classification(labels)
    found = metrics_of(objective, scores.float(), torch.from_numpy(true).double())
    guess = scores.float().argmax(1).numpy()
    assert found["loss"] == pytest.approx(
        sklearn_metrics.log_loss(true, functional.softmax(scores.float().double(), 1), labels=range(labels)), rel=1e-5
    )
    assert found["accuracy"] == sklearn_metrics.accuracy_score(true, guess)
    assert found["matthews"] == pytest.approx(sklearn_metrics.matthews_corrcoef(true, guess), abs=1e-12)
    if labels == 2:
        assert found["f1"] == pytest.approx(sklearn_metrics.f1_score(true, guess), abs=1e-12)
        assert "f1_macro" not in found
    else:
        assert found["f1_macro"] == pytest.approx(sklearn_metrics.f1_score(true, guess, average="macro"), abs=1e-12)
        assert "f1" not in found


def test_one_class_alone_has_a_correlation_of_0() -> None:
    found = metrics_of(Classification(2), torch.tensor([[1.0, 0.0]] * 4), torch.zeros(4).double())
    assert found["matthews"] == found["f1"] == 0
    assert found["accuracy"] == 1


def test_label_smoothing_is_that_of_torch() -> None:
    scores, true = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 3, 1])
    found = Classification(4, label_smoothing=0.2).loss(scores, true.double(), ONE / 6)
    assert found.loss.item() == pytest.approx(
        functional.cross_entropy(scores, true, label_smoothing=0.2).item(), rel=1e-6
    )


def test_regression_metrics_equal_those_of_scipy() -> None:
    rng = np.random.default_rng(2)
    targets = rng.integers(0, 11, size=80) / 2
    scores = targets + rng.normal(size=80)
    scores[:9] = 2.5
    objective = Regression()
    found = metrics_of(objective, torch.from_numpy(scores)[:, None], torch.from_numpy(targets))
    assert found["loss"] == pytest.approx(sklearn_metrics.mean_squared_error(targets, scores))
    assert found["pearson"] == pytest.approx(stats.pearsonr(scores, targets).statistic)
    spearman = objective.score_metrics(scores, targets)["spearman"]
    assert spearman == pytest.approx(stats.spearmanr(scores, targets).statistic)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_equal_scores_have_no_correlation(number: int) -> None:
    scores, targets = np.full(number, 0.1), np.arange(number) / 3
    objective = Regression()
    found = metrics_of(objective, torch.from_numpy(scores)[:, None], torch.from_numpy(targets))
    assert found["pearson"] == objective.score_metrics(scores, targets)["spearman"] == 0


def test_reward_metrics_are_means_over_pairs() -> None:
    scores = torch.tensor([2.0, 1.0, 0.5, 0.5, -1.0, 3.0])
    margins = torch.tensor([0.5, 0, 0, 0, 1.0, 0], dtype=torch.float64)
    found = metrics_of(Reward(center_weight=0.01), scores[:, None], margins)
    losses = [math.log1p(math.exp(-(1 - 0.5))), math.log(2), math.log1p(math.exp(4 + 1))]
    assert found["loss"] == pytest.approx(sum(losses) / 3 + 0.01 * (9 + 1 + 4) / 3)
    assert found["reward_margin"] == pytest.approx((1 + 0 - 4) / 3)
    assert found["reward_accuracy"] == pytest.approx(1 / 3)
    assert (found["reward_chosen"], found["reward_rejected"]) == pytest.approx((0.5, 1.5))


def test_equal_rewards_have_the_loss_ln_2_and_opposite_gradients() -> None:
    scores = torch.zeros(4, 1, requires_grad=True)
    found = Reward().loss(scores, torch.zeros(4).double(), ONE / 2)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(math.log(2), abs=1e-7)
    assert scores.grad is not None
    assert scores.grad.squeeze().tolist() == [-0.25, 0.25, -0.25, 0.25]


def test_sections_make_their_objectives() -> None:
    one = make_objective(ClassificationObjective(name="classification", num_labels=1))
    three = make_objective(ClassificationObjective(name="classification", labels=("a", "b", "c"), label_smoothing=0.3))
    reward = make_objective(RewardObjective(name="reward", center_weight=0.01))
    assert isinstance(one, Regression)
    assert isinstance(three, Classification)
    assert (three.num_outputs, three.label_smoothing) == (3, 0.3)
    assert isinstance(reward, Reward)
    assert reward.center_weight == 0.01
