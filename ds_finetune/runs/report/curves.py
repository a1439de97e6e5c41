"""Charts of the metrics of one run, or of several runs overlaid."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.metrics import Curve
from ds_finetune.runs.report.blocks import number_text
from ds_finetune.runs.report.charts import Chart, Line

MOST_POINTS = 1200
"""Maximum number of points of a drawn curve."""
POINTS_PER_BUCKET = 4
"""Maximum number of points drawn per bucket of a curve: lowest, highest and last value, and first non-finite one."""
_SMOOTHING_FRACTION, _MOST_SMOOTHED_STEPS, _FEWEST_SMOOTHED_POINTS = 40, 100, 30
"""A smoothed curve averages over a fortieth of the run before and after each step, at most over 100 steps each. Curves
with fewer than 30 points are not smoothed.
"""
_PAGE_POINTS, _FEWEST_POINTS = 60_000, 16
"""Points of all lines of a page, and minimum points of a line; a smoothed line adds half as many points."""
_MOST_OTHERS, _MOST_RANKS = 24, 8


@dataclass(frozen=True)
class CurveGroup:
    """Metrics that share a chart, each with the name of its line. Evaluations are drawn as points."""

    title: str
    labels: Mapping[str, str]
    number: str = "number"
    is_smoothed: bool = False
    can_be_logarithmic: bool = False


def _trained_and_held_out(metric: str) -> dict[str, str]:
    return {f"train/{metric}": "train", f"eval/{metric}": "eval"}


GROUPS = (
    CurveGroup(
        "Reward of sampled answers",
        {"rollout/reward": "rollouts", "eval/reward": "held out, greedy", "eval/pass_at_1": "held out, share right"},
        is_smoothed=True,
    ),
    CurveGroup(
        "Length of sampled answers (tokens)",
        {
            "rollout/answer_tokens": "mean",
            "rollout/answer_tokens_min": "shortest",
            "rollout/answer_tokens_max": "longest",
        },
    ),
    CurveGroup(
        "Groups of sampled answers",
        {"rollout/all_right": "all right", "rollout/all_wrong": "all wrong", "rollout/no_spread": "equal rewards"},
        "percent",
        is_smoothed=True,
    ),
    CurveGroup("Reward accuracy", _trained_and_held_out("reward_accuracy"), "percent", is_smoothed=True),
    CurveGroup("Reward margin", _trained_and_held_out("reward_margin"), is_smoothed=True),
    CurveGroup("Loss", _trained_and_held_out("loss"), is_smoothed=True, can_be_logarithmic=True),
    CurveGroup(
        "Accuracy", _trained_and_held_out("accuracy") | {"eval/exact_match": "exact match"}, "percent", is_smoothed=True
    ),
    CurveGroup("Gradient norm", {"train/grad_norm": "before clipping"}, is_smoothed=True, can_be_logarithmic=True),
    CurveGroup("Learning rate", {"optim/lr": "learning rate"}),
    CurveGroup(
        "Throughput (per second, all ranks)",
        {
            "perf/tokens_per_second": "tokens",
            "perf/supervised_tokens_per_second": "supervised tokens",
            "perf/examples_per_second": "examples",
        },
    ),
    CurveGroup(
        "Time of a step", {"perf/step_seconds": "whole step", "perf/data_wait_seconds": "wait for data"}, "seconds"
    ),
    CurveGroup("Peak memory of rank 0", {"memory/peak_gib": "peak so far"}, "gib"),
    CurveGroup("Model FLOPs utilisation", {"perf/mfu": "MFU"}, "percent"),
    CurveGroup("Slowest rank over the median", {"perf/straggler_ratio": "step time"}, "ratio"),
    CurveGroup(
        "Largest load of an expert over the mean, less 1",
        {"router/max_violation_mean": "mean of layers", "router/max_violation_max": "least even layer"},
    ),
    CurveGroup(
        "Effective experts of a layer",
        {"router/effective_experts_mean": "mean of layers", "router/effective_experts_min": "layer with the fewest"},
    ),
    CurveGroup("Entropy of the routers (nats)", {"router/entropy": "mean of layers"}),
    CurveGroup("Experts without a token", {"router/dead_experts": "all layers"}),
    CurveGroup("Tokens of a step with a loss", {"data/supervised_tokens": "supervised tokens"}),
    CurveGroup("Wait for a checkpoint", {"checkpoint/blocked_seconds": "blocked"}, "seconds"),
)
"""Charts of a report, if the run has one of their metrics."""
_WITHOUT_CHART = (
    "skipped",
    "skipped_steps",
    "tokens_seen",
    "perplexity",
    "predicted_gib",
    "measured_gib",
    "eta_seconds",
)
"""Last parts of names of metrics without a chart: the page shows them elsewhere, or they follow from another metric."""


def run_charts(run: RunFolder, markers: Sequence[tuple[int, str]] = ()) -> list[Chart]:
    """Charts of a run's metrics, those of its objective first; `markers` are labelled steps, such as restarts."""
    most = _points_of_a_line([run])
    return [
        _chart(group, group.title, [(label, run, name) for name, label in group.labels.items()], most, markers)
        for group in _groups_of([run])
    ]


def overlay_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    """A chart for each metric of two or more runs, with a line per run."""
    most, named = _points_of_a_line(runs), list(zip(run_labels(runs), runs, strict=True))
    charts = []
    for group in _groups_of(runs):
        for name, label in group.labels.items():
            title = group.title if len(group.labels) == 1 else f"{group.title}: {label}"
            charts.append(_chart(group, title, [(of_run, run, name) for of_run, run in named], most))
    return charts


def rank_chart(run: RunFolder) -> list[Chart]:
    """A chart of the time outside collectives by rank, as three lines for more than eight ranks; none for one rank."""
    times = run.rank_times
    if times is None or times[1].shape[1] < 2:
        return []
    steps, seconds = times
    indices = drawn_points(seconds.max(axis=1), MOST_POINTS)
    lines = [
        Line(name, steps[indices], times[indices], colour=colour)
        for colour, (name, times) in enumerate(_named_times(seconds).items())
    ]
    slowest = int(seconds[-1].argmax())
    summary = f"at the last step rank {slowest} is the slowest, with {number_text(seconds[-1, slowest], 'seconds')}"
    return [Chart("Step seconds of each rank, without collectives", lines, summary, "seconds", note=summary)]


def _named_times(seconds: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Step times [records] by name of their line, from seconds [records, ranks]."""
    ranks = seconds.shape[1]
    if ranks <= _MOST_RANKS:
        return {f"rank {rank}": seconds[:, rank] for rank in range(ranks)}
    slowest, median, fastest = seconds.max(axis=1), np.median(seconds, axis=1), seconds.min(axis=1)
    return {"slowest rank": slowest, "median": median, "fastest rank": fastest}


def _points_of_a_line(runs: Sequence[RunFolder]) -> int:
    """Maximum points per line, so that the page stays small."""
    lines = sum(len(run.curves) for run in runs)
    return max(_FEWEST_POINTS, min(MOST_POINTS, _PAGE_POINTS // max(lines, 1)))


def _groups_of(runs: Sequence[RunFolder]) -> list[CurveGroup]:
    """GROUPS with only the metrics that the runs have, and a group for each metric that is in none."""
    names = list(dict.fromkeys(name for run in runs for name, curve in run.curves.items() if len(curve)))
    groups, grouped = [], set[str]()
    for group in GROUPS:
        labels = {name: label for name in names if (label := _label_in(group, name))}
        grouped |= labels.keys()
        ordered = sorted(labels, key=lambda name: (name not in group.labels, [*group.labels, name].index(name)))
        groups += [replace(group, labels={name: labels[name] for name in ordered})] if labels else []
    ungrouped = [name for name in names if name not in grouped and name.rpartition("/")[2] not in _WITHOUT_CHART]
    return [*groups, *(CurveGroup(name, {name: name}) for name in ungrouped[:_MOST_OTHERS])]


def _label_in(group: CurveGroup, name: str) -> str:
    """Label of a metric in a group, with the name of its held-out set; empty if the metric is not in the group."""
    part, *of_set, metric = name.split("/")
    label = group.labels.get(f"{part}/{metric}", "") if part == "eval" or not of_set else ""
    return f"{label} {'/'.join(of_set)}" if of_set and label else label


def _chart(
    group: CurveGroup,
    title: str,
    series: Sequence[tuple[str, RunFolder, str]],
    most: int,
    markers: Sequence[tuple[int, str]] = (),
) -> Chart:
    """A chart with a line for each of `series`: line name, run and metric."""
    is_one_run = len({id(run) for _, run, _ in series}) == 1
    lines: list[Line] = []
    texts = []
    for colour, (label, run, name) in enumerate(series):
        if name in run.curves:
            smoothed = ("smoothed" if is_one_run else label) * group.is_smoothed
            lines += _lines_of(run.curves[name], name, Line(label, (), (), colour=colour), smoothed, most)
            texts.append(f"{label}: {_range_text(run.curves[name], group.number)}")
    values = np.concatenate([np.asarray(line.y) for line in lines])
    can_be_logarithmic = group.can_be_logarithmic and bool((values[np.isfinite(values)] > 0).all())
    return Chart(title, lines, "; ".join(texts), group.number, markers=markers, can_be_logarithmic=can_be_logarithmic)


def run_labels(runs: Sequence[RunFolder]) -> list[str]:
    """A name for each run: its path relative to the folder that all runs are in."""
    common = os.path.commonpath([run.path.parent for run in runs])
    return [os.path.relpath(run.path, common) for run in runs]


def _lines_of(curve: Curve, name: str, line: Line, smoothed: str, most: int) -> list[Line]:
    """The lines of a metric: points for evaluations and saves, else a line, faint behind one named `smoothed`."""
    steps, values = curve.steps, curve.values
    indices = drawn_points(values, most)
    line = replace(line, x=steps[indices], y=values[indices])
    if name.startswith(("eval/", "checkpoint/")):
        return [replace(line, role="points")]
    if not smoothed or len(curve) < _FEWEST_SMOOTHED_POINTS:
        return [line]
    means = smooth(values, max(1, min(_MOST_SMOOTHED_STEPS, len(curve) // _SMOOTHING_FRACTION)))
    indices = drawn_points(means, most // 2)
    return [replace(line, role="faint"), replace(line, name=smoothed, x=steps[indices], y=means[indices])]


def _range_text(curve: Curve, number: str) -> str:
    values = curve.values[np.isfinite(curve.values)]
    if not len(values):
        return "no finite value"
    texts = [number_text(float(value), number) for value in (values[0], values[-1], values.min(), values.max())]
    return f"from {texts[0]} to {texts[1]}, lowest {texts[2]}, highest {texts[3]}, {len(values):,} values"


def drawn_points(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Ascending indices [at most `most`] of values [n] with which a curve looks as with all values.

    The values are cut into buckets of equal length. The lowest, the highest and the last value of each bucket are
    drawn, and its first NaN or infinity, so that no spike, dip or gap is lost; the first value too. `most` is at least
    8.
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
    indices = [
        np.zeros(1, dtype=np.intp),
        (starts + np.where(is_finite, grid, np.inf).argmin(axis=1))[has_finite],
        (starts + np.where(is_finite, grid, -np.inf).argmax(axis=1))[has_finite],
        (starts + is_missing.argmax(axis=1))[is_missing.any(axis=1)],
        ends[is_used],
    ]
    return np.unique(np.concatenate(indices))


def smooth(values: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
    """Centred moving average [n]: the mean of the finite values [n] up to `reach` before and after each value.

    A centred average does not lag behind a falling curve. Windows are cut off at both ends. NaN and infinity become
    NaN.
    """
    is_finite, window = np.isfinite(values), np.ones(2 * reach + 1)
    sums, counts = (
        np.convolve(part, window)[reach : reach + len(values)] for part in (np.where(is_finite, values, 0.0), is_finite)
    )
    return np.where(is_finite, sums / np.maximum(counts, 1), np.nan)
