"""Fewer points of a curve for drawing, without losing a spike."""

import numpy as np
from numpy.typing import NDArray

POINTS_PER_BUCKET = 4
"""At most the lowest, the highest, the last value and the first that is not finite."""


def drawn_points(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Ascending indices [at most `most`] of the values [n] that draw the same curve as all of them.

    The values are cut into buckets of equal length. Of each bucket the lowest, the highest and the last value remain,
    and the first NaN or infinity. So no spike, dip or gap is lost, and the first and the last value always remain.
    `most` is at least 8.
    """
    assert most >= 2 * POINTS_PER_BUCKET, most
    n = len(values)
    if n <= most:
        return np.arange(n)
    buckets = (most - 1) // POINTS_PER_BUCKET
    size = -(-n // buckets)
    padded = np.full(buckets * size, np.nan)
    padded[:n] = values
    grid = padded.reshape(buckets, size)
    is_finite = np.isfinite(grid)
    starts = np.arange(buckets) * size
    ends = np.minimum(starts + size, n) - 1
    has_finite, is_used = is_finite.any(axis=1), starts < n
    is_missing = ~is_finite
    is_missing.reshape(-1)[n:] = False
    kept = [
        np.zeros(1, dtype=np.intp),
        (starts + np.where(is_finite, grid, np.inf).argmin(axis=1))[has_finite],
        (starts + np.where(is_finite, grid, -np.inf).argmax(axis=1))[has_finite],
        (starts + is_missing.argmax(axis=1))[is_missing.any(axis=1)],
        ends[is_used],
    ]
    return np.unique(np.concatenate(kept))


def smooth(values: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
    """Exponential moving average of the values [n], without the bias to zero of its beginning; NaN stays NaN.

    Each average is `weight` (0 to less than 1) of the one before and the rest of the value, as in TensorBoard.
    """
    assert 0 <= weight < 1, weight
    smoothed = np.full(len(values), np.nan)
    total = norm = 0.0
    for index, value in enumerate(values):
        if np.isfinite(value):
            total, norm = weight * total + (1 - weight) * value, weight * norm + 1 - weight
            smoothed[index] = total / norm
    return smoothed
