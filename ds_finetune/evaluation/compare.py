"""Two models on the same documents: each metric, the difference, and how far chance in the documents could move it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_finetune.evaluation.model_scores import Scores

RESAMPLES = 2000
METHOD = f"paired bootstrap over documents: {RESAMPLES} resamples with seed 0, 2.5th and 97.5th percentile"
_CELLS_AT_ONCE = 2**24
"""Documents x resamples whose counts are held at a time."""


@dataclass(frozen=True)
class Metric:
    """A value, the baseline's and the difference (value - baseline) where there is one, and the 95% interval of the
    difference, else of the value.
    """

    value: float
    baseline: float | None
    difference: float | None
    interval: tuple[float, float]


def compare(scores: Scores, baseline: Scores | None) -> dict[str, Metric]:
    """Metrics by name: `loss` (nats per supervised token), `perplexity`, `token_accuracy`, and `exact_match` where
    answers were asked for.
    """
    if baseline is not None:
        assert np.array_equal(scores.tokens, baseline.tokens), "not the same documents"
    ones = np.ones((1, len(scores.tokens)))
    here = {name: float(values[0]) for name, values in _metrics(scores, ones).items()}
    there = None if baseline is None else {name: float(values[0]) for name, values in _metrics(baseline, ones).items()}
    drawn = _resampled(scores, baseline)
    return {
        name: Metric(
            value=value,
            baseline=None if there is None else there[name],
            difference=None if there is None else value - there[name],
            interval=(float(np.percentile(drawn[name], 2.5)), float(np.percentile(drawn[name], 97.5))),
        )
        for name, value in here.items()
    }


def _resampled(scores: Scores, baseline: Scores | None) -> Mapping[str, NDArray[np.float64]]:
    """Each metric, or its difference, of every resample."""
    parts: dict[str, list[NDArray[np.float64]]] = {}
    for counts in _draws(len(scores.tokens)):
        here = _metrics(scores, counts)
        there = None if baseline is None else _metrics(baseline, counts)
        for name, values in here.items():
            parts.setdefault(name, []).append(values if there is None else values - there[name])
    return {name: np.concatenate(values) for name, values in parts.items()}


def _draws(documents: int) -> Iterator[NDArray[np.float64]]:
    """How often each document is drawn, [resamples, documents], a part of the resamples at a time."""
    rng = np.random.default_rng(0)
    left, most = RESAMPLES, max(1, _CELLS_AT_ONCE // documents)
    while left:
        size = min(left, most)
        left -= size
        yield rng.multinomial(documents, np.full(documents, 1 / documents), size=size).astype(np.float64)


def _metrics(scores: Scores, counts: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Metrics of documents taken `counts` [samples, documents] times, [samples] each."""
    tokens = counts @ scores.tokens
    loss = counts @ scores.loss / tokens
    found = {"loss": loss, "perplexity": np.exp(loss), "token_accuracy": counts @ scores.correct / tokens}
    if scores.exact is not None:
        found["exact_match"] = counts @ scores.exact / counts.sum(axis=1)
    return found
