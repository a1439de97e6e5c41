"""The pages of experiments, in the form of a run's report: of sweeps, range tests and comparisons."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ds_finetune.config.units import share_text
from ds_finetune.runs.experiments.lr_range import LrRange
from ds_finetune.runs.experiments.scaling import COLUMNS, Comparison, Measurement, table_row
from ds_finetune.runs.report.blocks import (
    Chart,
    Charts,
    DataTable,
    Facts,
    Page,
    Remark,
    ReportSection,
    Tile,
    duration_text,
    number_text,
)
from ds_finetune.runs.report.charts import CoordinateAxis, Line, NumberAxis, line_plot, parallel_plot
from ds_finetune.runs.report.write import write_page

REPORT = "report.html"
_TRIALS_OF_A_KEY = 20
_ROUGH_IMPORTANCE = (
    "The importances are of {} trials and rough: with other trials another key may come first. About {} trials are "
    "needed for this many keys."
)
_MOST_CURVES = 40
"""Trials whose curves are drawn, the best ones."""


def write_sweep_page(folder: Path, tree: Mapping[str, Any]) -> Path:
    """Write the report of a sweep, whose `sweep.json` holds `tree`; returns the file."""
    trials = tree["trials"]
    valued = [trial for trial in trials if trial["value"] is not None and math.isfinite(trial["value"])]
    ranked = sorted(valued, key=lambda trial: trial["value"], reverse=tree["direction"] == "maximize")
    sections = [
        *([_search_section(tree, ranked)] if len(valued) > 1 else []),
        *([_repeats_section(tree)] if tree["repeats"] else []),
        ReportSection("trials", "Trials", [_trials_table(tree, trials)]),
        ReportSection("repeat", "How to continue or repeat it", [Facts([("run file", f"{folder / 'best.yaml'}")])]),
    ]
    page = Page(f"Sweep of {tree['run']}", tree["metric"], "", _sweep_tiles(tree), sections)
    return write_page(page, folder / REPORT)


def _sweep_tiles(tree: Mapping[str, Any]) -> list[Tile]:
    states = [trial["state"] for trial in tree["trials"]]
    tiles = [Tile("trials", f"{len(states)}", f"{states.count('pruned')} pruned, {states.count('fail')} failed")]
    best = next((trial for trial in tree["trials"] if trial["number"] == tree["best"]), None)
    if best is not None:
        tiles.append(Tile(f"best {tree['metric']}", number_text(best["value"]), f"trial {best['number']}"))
        tiles += [Tile(key, _text(value)) for key, value in best["values"].items()]
    seconds = sum(trial["seconds"] or 0 for trial in tree["trials"])
    return [*tiles, Tile("time of trials", duration_text(seconds))]


def _search_section(tree: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]]) -> ReportSection:
    text = f"{len(ranked)} trials; the best is trial {ranked[0]['number']}"
    note = "A line is a trial; blue ones are best. Drag along an axis to keep only trials within a range."
    charts = [Chart("Trials by their values", _parallel(tree, ranked), text, is_wide=True, height=340, note=note)]
    curves = [trial for trial in ranked if len(trial["steps"]) > 1][:_MOST_CURVES]
    if curves:
        plot = line_plot([_curve(trial, place) for place, trial in enumerate(curves)])
        title = f"{tree['metric']} while trials ran"
        charts.append(Chart(title, plot, f"curves of {len(curves)} trials", is_wide=True))
    blocks: list[Charts | DataTable | Remark] = [Charts(charts)]
    if tree["importances"]:
        rows = [(key, share_text(share)) for key, share in tree["importances"].items()]
        blocks.append(DataTable("Importance of keys (PED-ANOVA over completed trials)", ("key", "importance"), rows))
        if len(ranked) < _TRIALS_OF_A_KEY * len(rows):
            blocks.append(Remark(_ROUGH_IMPORTANCE.format(len(ranked), _TRIALS_OF_A_KEY * len(rows))))
    return ReportSection("search", "Search", blocks)


def _parallel(tree: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    axes = []
    for key, space in tree["space"].items():
        choices = tuple(_text(choice) for choice in space.get("choices") or ())
        ends = (space.get("low"), space.get("high"))
        axes.append(CoordinateAxis(key, is_log=bool(space.get("log")), choices=choices, ends=ends))
    rows = [
        [_text(trial["values"][axis.name]) if axis.choices else float(trial["values"][axis.name]) for axis in axes]
        + [trial["value"]]
        for trial in ranked
    ]
    return parallel_plot([*axes, CoordinateAxis(tree["metric"])], rows, is_maximized=tree["direction"] == "maximize")


def _curve(trial: Mapping[str, Any], place: int) -> Line:
    steps = np.array([step for step, _ in trial["steps"]], dtype=np.int64)
    values = np.array([value for _, value in trial["steps"]], dtype=np.float64)
    return Line(f"trial {trial['number']}", steps, values, role="points", colour=place)


def _repeats_section(tree: Mapping[str, Any]) -> ReportSection:
    rows = [
        (f"trial {each['trial']}, seed {each['seed']}", each["reason"] or number_text(each["value"]))
        for each in tree["repeats"]
    ]
    values = [each["value"] for each in tree["repeats"] if each["value"] is not None and each["trial"] == tree["best"]]
    spread = number_text(max(values) - min(values)) if len(values) > 1 else ""
    note = [Remark(f"Its seeds differ by {spread}: smaller differences between trials mean nothing.")] if spread else []
    table = DataTable("Trainings", ("run", tree["metric"]), rows)
    return ReportSection("seeds", "The best run file with other seeds", [table, *note])


def _trials_table(tree: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> DataTable:
    keys = list(tree["space"])
    rows = [
        (
            str(trial["number"]),
            trial["state"] if not trial["reason"] else f"{trial['state']}: {trial['reason']}",
            *(_text(trial["values"].get(key)) for key in keys),
            number_text(trial["value"]),
            duration_text(trial["seconds"]) if trial["seconds"] else "-",
        )
        for trial in trials
    ]
    return DataTable("All trials", ("trial", "state", *keys, tree["metric"], "time"), rows, 2)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def write_range_page(folder: Path, run: str, found: LrRange) -> Path:
    """Write the report of a range test; returns the file."""
    ends = (min(found.losses), max(found.losses))
    lines = [
        Line("train/loss", found.rates, found.losses, role="faint"),
        Line("smoothed", found.rates, found.smoothed),
        Line("steepest fall", (found.steepest, found.steepest), ends, role="dashed", colour=2),
        Line("least loss", (found.lowest, found.lowest), ends, role="dashed", colour=4),
    ]
    chart = Chart(
        "Loss over the learning rate",
        line_plot(lines, NumberAxis("learning rate", is_log=True, is_whole=False)),
        f"steepest fall at {found.steepest:.2e}, least loss at {found.lowest:.2e}",
        is_wide=True,
        height=380,
    )
    message = Remark(
        "A range test sets nothing. With AdamW and warm-up it often points at too high a rate; compare some rates "
        "below these by a sweep."
    )
    sections = [ReportSection("curve", "Range test", [Charts([chart]), Facts(found.lines()[:-1]), message])]
    tiles = [Tile("steepest fall", f"{found.steepest:.2e}"), Tile("least loss", f"{found.lowest:.2e}")]
    return write_page(Page(f"Learning rates of {run}", "train/loss", "", tiles, sections), folder / REPORT)


def write_scaling_page(folder: Path, run: str, compared: Comparison) -> Path:
    """Write the report of a comparison of ranks and layouts; returns the file."""
    rows = compared.rows
    fastest = max(rows, key=lambda row: row.speedup)
    largest = max(row.loss_difference for row in rows)
    table = DataTable("Relative to the first row", COLUMNS, [table_row(row) for row in rows])
    sections = [
        ReportSection("table", "Comparison", [table]),
        ReportSection("plots", "Plots", [Charts([*_speed_charts(rows), _loss_chart(rows)])]),
    ]
    tiles = [
        Tile("fastest", fastest.variant.name, f"{fastest.speedup:.2f} times {rows[0].variant.name}"),
        Tile("losses differ by", f"{largest:.1e}", "at most, relative"),
    ]
    warnings = [f"{name} failed: {reason}" for name, reason in compared.failed]
    page = Page(f"Scaling of {run}", "the same global batches", "", tiles, sections, warnings)
    return write_page(page, folder / REPORT)


def _speed_charts(rows: Sequence[Measurement]) -> list[Chart]:
    """Speed-up over ranks, a line for each layout; none where all rows have the same number of ranks."""
    ranks = sorted({row.variant.ranks for row in rows})
    if len(ranks) < 2:
        return []
    lines = []
    for colour, layout in enumerate(dict.fromkeys(row.variant.layout for row in rows)):
        own = sorted((row for row in rows if row.variant.layout == layout), key=lambda row: row.variant.ranks)
        numbers, speedups = [row.variant.ranks for row in own], [row.speedup for row in own]
        lines.append(Line(layout or "measured", numbers, speedups, role="points", colour=colour))
    ideal = Line("ideal", ranks, [number / rows[0].variant.ranks for number in ranks], role="dashed", colour=7)
    plot = line_plot([*lines, ideal], NumberAxis("ranks"))
    return [Chart("Speed-up", plot, f"up to {max(row.speedup for row in rows):.2f}")]


def _loss_chart(rows: Sequence[Measurement]) -> Chart:
    lines = [
        Line(row.variant.name, np.arange(1, len(row.losses) + 1), np.array(row.losses), colour=colour)
        for colour, row in enumerate(rows)
    ]
    difference = max(row.loss_difference for row in rows)
    return Chart("train/loss", line_plot(lines), f"curves differ by at most {difference:.1e}")
