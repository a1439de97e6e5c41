"""Makes one reward of several for each answer."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def combine_rewards(
    parts: Numbers, weights: Numbers, groups: NDArray[np.int64], how: Literal["sum", "each"]
) -> Numbers:
    """The reward of each answer, fp64 [answers], from those of all functions, fp64 [answers, rewards].

    `sum` is sum_k w_k r_k. `each` is sum_k w_k (r_k - mean_k) / std_k with mean and standard deviation (of n - 1) over
    the answers of a group, as in GDPO (arXiv 2601.05242), where a reward that is equal in the whole group counts as 0;
    its last step, the normalisation over the batch, is not done. `groups` has the number of the group of each answer.
    NaN, not applicable, is left out; an answer to which no reward applies is NaN.
    """
    applies = ~np.isnan(parts)
    if how == "each":
        parts = np.stack([_normalised(column, groups) for column in parts.T], axis=1)
    total = np.where(applies, parts * weights, 0.0).sum(axis=1)
    return np.where(applies.any(axis=1), total, np.nan)


def _normalised(scores: Numbers, groups: NDArray[np.int64]) -> Numbers:
    """Scores less the mean of their group, divided by its standard deviation."""
    result = np.zeros_like(scores)
    for group in np.unique(groups):
        own = (groups == group) & ~np.isnan(scores)
        values = scores[own]
        # Not by the standard deviation, which rounding makes greater than 0 for some equal numbers.
        if len(values) > 1 and values.max() > values.min():
            result[own] = (values - values.mean()) / values.std(ddof=1)
    return result
