"""Compares the scores of two models on the same documents, with confidence intervals from a paired bootstrap."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ds_finetune.evaluation.model_scores import Scores
from ds_finetune.evaluation.objective_scores import ObjectiveScores

RESAMPLES = 2000
METHOD = f"paired bootstrap over documents: {RESAMPLES} resamples with seed 0, 2.5th and 97.5th percentile"
_CELLS_AT_ONCE = 2**24
"""Largest size, documents x resamples, of a matrix of bootstrap counts in memory."""


AnyScores = TypeVar("AnyScores", Scores, ObjectiveScores)
"""Scores of a model for documents, texts or pairs (units), from which the metrics of any sample of units follow."""


@dataclass(frozen=True)
class Metric:
    """A metric and its 95% confidence interval.

    With a baseline, also the baseline's value and the difference (value - baseline) with its interval.
    """

    value: float
    baseline: float | None
    difference: float | None
    interval: tuple[float, float]


def compare(scores: AnyScores, baseline: AnyScores | None) -> dict[str, Metric]:
    """Compute the metrics of `scores` with confidence intervals, compared with a `baseline` on the same documents."""
    if baseline is not None:
        assert len(scores) == len(baseline), "not the same documents"
    ones = np.ones((1, len(scores)))
    of_baseline = {} if baseline is None else baseline.metrics(ones)
    resampled, metrics = _resample(scores, baseline), dict[str, Metric]()
    for name, values in scores.metrics(ones).items():
        value, other = float(values[0]), float(of_baseline[name][0]) if of_baseline else None
        low, high = np.nanpercentile(resampled[name], (2.5, 97.5)).tolist()
        metrics[name] = Metric(value, other, None if other is None else value - other, (low, high))
    return metrics


def _resample(scores: AnyScores, baseline: AnyScores | None) -> Mapping[str, NDArray[np.float64]]:
    parts: dict[str, list[NDArray[np.float64]]] = {}
    documents, rng = len(scores), np.random.default_rng(0)
    most = max(1, _CELLS_AT_ONCE // documents)
    for first in range(0, RESAMPLES, most):
        size = min(RESAMPLES - first, most)
        # Counts [resamples, documents] say how often a bootstrap resample contains a document.
        counts = rng.multinomial(documents, np.full(documents, 1 / documents), size=size).astype(np.float64)
        of_model = scores.metrics(counts)
        of_baseline = None if baseline is None else baseline.metrics(counts)
        for name, values in of_model.items():
            parts.setdefault(name, []).append(values if of_baseline is None else values - of_baseline[name])
    return {name: np.concatenate(values) for name, values in parts.items()}
