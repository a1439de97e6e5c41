"""Intervals against the textbook, and pairs that cancel."""

import numpy as np
import pytest

from ds_finetune.evaluation import compare as module
from ds_finetune.evaluation.compare import compare
from ds_finetune.evaluation.model_scores import Scores


def _scores(seed: int, documents: int = 400, shift: float = 0.0) -> Scores:
    rng = np.random.default_rng(seed)
    tokens = np.full(documents, 10.0)
    return Scores(
        rng.normal(20 + shift, 3, documents),
        tokens,
        rng.integers(0, 10, documents).astype(float),
        {"exact_match": (rng.random(documents) < 0.3) * 1.0},
    )


def test_the_interval_is_the_normal_one_where_documents_are_equally_long() -> None:
    scores = _scores(0)
    found = compare(scores, None)
    per_document = scores.loss / 10
    wide = 1.96 * per_document.std() / 20
    assert found["loss"].value == pytest.approx(per_document.mean())
    assert found["loss"].interval == pytest.approx(
        (per_document.mean() - wide, per_document.mean() + wide), abs=0.1 * wide
    )
    assert found["loss"].difference is None
    share = scores.answers["exact_match"].mean()
    wide = 1.96 * (share * (1 - share)) ** 0.5 / 20
    assert found["exact_match"].interval == pytest.approx((share - wide, share + wide), abs=0.1 * wide)


def test_a_model_does_not_differ_from_itself() -> None:
    for metric in compare(_scores(1), _scores(1)).values():
        assert (metric.difference, metric.interval) == (0.0, (0.0, 0.0))


def test_pairing_takes_out_what_documents_share() -> None:
    here = _scores(2)
    there = Scores(here.loss + 0.5, here.tokens, here.correct, here.answers)
    found = compare(here, there)
    assert found["loss"].difference == pytest.approx(-0.05)
    assert found["loss"].interval == pytest.approx((-0.05, -0.05))
    assert found["perplexity"].value == pytest.approx(np.exp(here.loss.sum() / here.tokens.sum()))
    low, high = found["perplexity"].interval
    assert low < found["perplexity"].difference < high < 0  # type: ignore[operator]


def test_long_documents_weigh_as_many_tokens() -> None:
    scores = Scores(np.array([100.0, 1.0]), np.array([100.0, 1.0]) * 2, np.array([50.0, 0.0]))
    found = compare(scores, None)
    assert (found["loss"].value, found["token_accuracy"].value) == (0.5, 50 / 202)
    assert "exact_match" not in found


def test_the_same_draws_however_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(_scores(3, 50), _scores(4, 50))
    monkeypatch.setattr(module, "_CELLS_AT_ONCE", 50 * 7)
    for name, metric in compare(_scores(3, 50), _scores(4, 50)).items():
        assert metric.interval == pytest.approx(whole[name].interval)


def test_other_documents_are_a_programmers_mistake() -> None:
    with pytest.raises(AssertionError, match="not the same documents"):
        compare(_scores(0, 3), _scores(0, 4))
