"""Points of curves for drawing: fewer points that still show every spike, and a smoothed line."""

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

_DIGITS = 6
POINTS_PER_BUCKET = 4
"""Per bucket: at most the lowest, the highest and the last value, and the first non-finite one."""


def drawn_points(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Ascending indices [at most `most`] of the values [n] that draw the same curve as all values.

    The values are cut into buckets of equal length. From each bucket the lowest, the highest and the last value remain,
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


def smooth(values: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
    """Centred moving average of the values [n]: each is the mean of the finite ones up to `reach` before and after it.

    A centred average does not lag behind a falling curve. At both ends the window shrinks on both sides, so the first
    and the last value stay. NaN and infinity become NaN.
    """
    n, is_finite = len(values), np.isfinite(values)
    filled, reach = np.where(is_finite, values, 0.0), min(reach, max(n - 1, 0) // 2)
    smoothed = np.where(is_finite, values, np.nan)
    if not reach:
        return smoothed
    places = np.flatnonzero(is_finite)
    for place in places[np.minimum(places, n - 1 - places) < reach]:
        near = min(place, n - 1 - place)
        window = slice(place - near, place + near + 1)
        smoothed[place] = filled[window].sum() / is_finite[window].sum()
    sums, counts = (sliding_window_view(part, 2 * reach + 1).sum(axis=1) for part in (filled, is_finite))
    middle = slice(reach, n - reach)
    smoothed[middle] = np.where(is_finite[middle], sums / np.maximum(counts, 1), np.nan)
    return smoothed


def rounded(values: list[float]) -> list[float | None]:
    """The values with six significant digits, and None for non-finite ones, which JSON cannot represent."""
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values]
