"""Charts of the metrics of one run or of several runs, as data that `templates/page.js` draws."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_finetune.runs.folder import RANK_TIMES, RunFolder
from ds_finetune.runs.metrics import Curve, parse_records

MOST_POINTS, _FEWEST_POINTS, _PAGE_POINTS = 1200, 16, 60_000
"""Limits of drawn points: the most and the fewest of one line, and the total that all lines of a page share."""
POINTS_PER_STRETCH = 4
_SMOOTHING_FRACTION, _MOST_SMOOTHED_STEPS, _FEWEST_SMOOTHED_POINTS = 40, 100, 30
"""A smoothed curve averages, at each step, over a fortieth of the run before and after it, but over at most 100 steps
on either side. A curve with fewer than 30 points is not smoothed.
"""
_MOST_RANKS = 8
_FIRST_TITLES = ("reward", "answer_tokens", "reward_accuracy", "reward_margin", "loss", "accuracy", "grad_norm")
"""Titles of the charts that a page shows first, if the run has their metrics."""
_WITHOUT_CHART = ("skipped", "skipped_steps", "tokens_seen", "predicted_gib", "measured_gib", "eta_seconds")
"""Metrics without a chart, by the last part of their names: a page shows these values elsewhere."""
_PERCENTAGES = ("accuracy", "exact_match", "reward_accuracy", "mfu", "mtp_accuracy")
_KIND_SUFFIXES = ("_mean", "_min", "_max")


@dataclass(frozen=True)
class Line:
    """A line of a chart with values y [n] at positions x [n]. NaN leaves a gap.

    `role` says how the line is drawn: as `line`, `faint` (behind a mean), `mean`, `points` (joined by a line), `dots`
    (not joined), or `dashed`. `colour` is an index of the palette.
    """

    name: str
    x: ArrayLike
    y: ArrayLike
    role: str = "line"
    colour: int = 0

    def tree(self) -> dict[str, Any]:
        """The line as a JSON object. Numbers have six digits, and null stands for NaN and infinity."""
        numbers = {name: [_rounded(each) for each in np.asarray(getattr(self, name)).tolist()] for name in "xy"}
        return {"name": self.name, "role": self.role, "colour": self.colour, **numbers}


def _rounded(value: object) -> object:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if np.isfinite(value) else None


@dataclass(frozen=True)
class Chart:
    """A chart of lines over steps or over other numbers.

    If there are `categories`, each x value is one of these texts. `markers` are steps at which a vertical dashed line
    is drawn.
    """

    title: str
    lines: Sequence[Line]
    x_name: str = "step"
    has_log_x: bool = False
    categories: Sequence[str] = ()
    markers: Sequence[int] = ()
    is_percent: bool = False
    is_wide: bool = False

    def tree(self) -> dict[str, Any]:
        """The chart as a JSON object."""
        return {**vars(self), "lines": [line.tree() for line in self.lines]}


def is_percentage(metric: str) -> bool:
    """Whether a metric is a fraction that pages and model cards show in percent."""
    return metric.rpartition("/")[2] in _PERCENTAGES


def run_charts(run: RunFolder, markers: Sequence[int] = ()) -> list[Chart]:
    """Make the charts of a run's metrics. `markers` are steps to mark, such as restarts.

    Metrics of one quantity share a chart, e.g. `train/loss`, `eval/loss` and the loss of each held-out set.
    """
    by_title: dict[str, list[str]] = {}
    for name in _metrics_of([run]):
        by_title.setdefault(_title(name), []).append(name)
    return [
        _chart(title, [(name, run, name) for name in names], len(run.curves), markers)
        for title, names in sorted(by_title.items(), key=lambda item: _position(item[0]))
    ]


def overlay_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    """Make a chart for each metric of two or more runs, with a line for each run."""
    labels, num_lines = run_labels(runs), sum(len(run.curves) for run in runs)
    names = sorted(_metrics_of(runs), key=lambda name: _position(_title(name)))
    return [
        _chart(name, [(label, run, name) for label, run in zip(labels, runs, strict=True)], num_lines) for name in names
    ]


def rank_charts(run: RunFolder) -> list[Chart]:
    """Make the chart of step times by rank. For more than eight ranks it shows the slowest, the median and the fastest
    rank; for one rank there is no chart.
    """
    times_of = parse_records(
        run.records(RANK_TIMES), lambda record: (record["step"], [float(each) for each in record["seconds"]])
    )
    # A run may have resumed on another number of ranks. Only steps with as many ranks as the last one are drawn.
    ranks = len(times_of[-1][1]) if times_of else 0
    times_of = [(step, seconds) for step, seconds in times_of if len(seconds) == ranks]
    if ranks < 2:
        return []
    steps, seconds = np.array([step for step, _ in times_of]), np.array([seconds for _, seconds in times_of])
    times = {f"rank {rank}": seconds[:, rank] for rank in range(ranks)}
    if ranks > _MOST_RANKS:
        median = np.median(seconds, axis=1)
        times = {"slowest rank": seconds.max(axis=1), "median": median, "fastest rank": seconds.min(axis=1)}
    indices = drawn_points(seconds.max(axis=1), MOST_POINTS)
    lines = [Line(name, steps[indices], each[indices], colour=at) for at, (name, each) in enumerate(times.items())]
    return [Chart("seconds of a step by rank", lines, is_wide=True)]


def _metrics_of(runs: Sequence[RunFolder]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name, curve in run.curves.items() if len(curve))
    return [name for name in names if name.rpartition("/")[2] not in _WITHOUT_CHART]


def _title(metric: str) -> str:
    """Title of the chart that shows `metric`. Metrics of one quantity have the same title."""
    section, *middle, last = metric.split("/")
    if section == "comm":
        return f"comm/*_{last.rpartition('_')[2]}"
    if section == "rollout" and middle:
        return f"rollout/{middle[0]}"
    for suffix in _KIND_SUFFIXES:
        last = last.removesuffix(suffix)
    return last if section in ("train", "eval", "rollout") else "/".join([section, *middle, last])


def _position(title: str) -> int:
    return _FIRST_TITLES.index(title) if title in _FIRST_TITLES else len(_FIRST_TITLES)


def _chart(
    title: str, series: Sequence[tuple[str, RunFolder, str]], num_lines: int, markers: Sequence[int] = ()
) -> Chart:
    """Make a chart with a line for each item of `series`: the label of the line, a run, and the name of a metric. The
    charts of the page together have `num_lines` lines.
    """
    most = max(_FEWEST_POINTS, min(MOST_POINTS, _PAGE_POINTS // max(num_lines, 1)))
    lines: list[Line] = []
    for colour, (label, run, name) in enumerate(series):
        if name in run.curves:
            lines += _lines_of(run.curves[name], name, Line(label, (), (), colour=colour), most)
    return Chart(title, lines, markers=markers, is_percent=is_percentage(title))


def run_labels(runs: Sequence[RunFolder]) -> list[str]:
    """A distinct name for each run: its path relative to the nearest folder that contains all runs."""
    common = os.path.commonpath([run.path.parent for run in runs])
    return [os.path.relpath(run.path, common) for run in runs]


def _lines_of(curve: Curve, name: str, line: Line, most: int) -> Iterator[Line]:
    steps, values = curve.steps, curve.values
    indices = drawn_points(values, most)
    line = replace(line, x=steps[indices], y=values[indices])
    if name.startswith(("eval/", "checkpoint/")):
        yield replace(line, role="points")
    elif len(curve) < _FEWEST_SMOOTHED_POINTS or not name.startswith(("train/", "rollout/")):
        yield line
    else:
        means = smooth(values, min(_MOST_SMOOTHED_STEPS, max(1, len(curve) // _SMOOTHING_FRACTION)))
        indices = drawn_points(means, most // 2)
        yield replace(line, role="faint")
        yield replace(line, role="mean", x=steps[indices], y=means[indices])


def drawn_points(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Choose which of the `values` [n] of a curve to draw, without a visible difference to all of them. Returns at most
    `most` (8 or more) ascending indices.

    The curve is divided into equal stretches. Of each stretch the lowest, the highest, the last and the first
    non-finite value are drawn, so that no spike, dip or gap is lost. The first value of the curve is drawn too.
    """
    assert most >= 2 * POINTS_PER_STRETCH, most
    n = len(values)
    if n <= most:
        return np.arange(n)
    size = -(-n // ((most - 1) // POINTS_PER_STRETCH))
    starts = np.arange(0, n, size)
    # The last stretch of the curve is padded to the size of the others. Indices in the padding become the curve's last
    # index.
    padded = np.pad(values, (0, len(starts) * size - n), mode="edge").reshape(-1, size)
    is_finite = np.isfinite(padded)
    stretch_indices = [
        np.where(is_finite, padded, np.inf).argmin(axis=1),
        np.where(is_finite, padded, -np.inf).argmax(axis=1),
        is_finite.argmin(axis=1),
        np.full(len(starts), size - 1),
    ]
    return np.unique([0, *np.minimum(starts + np.stack(stretch_indices), n - 1).ravel()])


def smooth(values: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
    """Centred moving average [n]: the mean of the finite values [n] up to `reach` before and after each value.

    A centred average does not lag behind a falling curve. Windows are cut off at both ends of the curve. A value that
    is NaN or infinite becomes NaN.
    """
    is_finite, window = np.isfinite(values), np.ones(2 * reach + 1)
    sums, counts = (
        np.convolve(part, window)[reach : reach + len(values)] for part in (np.where(is_finite, values, 0.0), is_finite)
    )
    return np.where(is_finite, sums / np.maximum(counts, 1), np.nan)
