"""The pages of experiments, in the form of a run's report: sweeps, range tests and comparisons."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ds_finetune.runs.experiments.lr_range import range_lines
from ds_finetune.runs.experiments.scaling import COLUMNS, table_row
from ds_finetune.runs.report.blocks import Chart, Charts, DataTable, Facts, Page, ReportSection, Tile, duration_text
from ds_finetune.runs.report.blocks import number_text as number
from ds_finetune.runs.report.charts import CoordinateAxis, Line, LinePlot, ParallelPlot
from ds_finetune.runs.report.write import write_page

REPORT = "report.html"


def write_sweep_page(folder: Path, tree: dict[str, Any]) -> Path:
    """Write the report of a sweep, whose `sweep.json` holds `tree`; returns the file."""
    trials, metric, keys = tree["trials"], tree["metric"], list(tree["space"])
    best = trials[tree["best"]]
    rows = [
        (
            str(trial["number"]),
            f"{trial['state']}: {trial['reason']}" if trial["reason"] else trial["state"],
            *(value_text(trial["values"].get(key)) for key in keys),
            number(trial["value"]),
            duration_text(trial["seconds"]) if trial["seconds"] else "-",
        )
        for trial in trials
    ]
    table = DataTable("All trials", ("trial", "state", *keys, metric, "time"), rows, 2)
    states = [trial["state"] for trial in trials]
    tiles = [
        Tile("trials", f"{len(states)}", f"{states.count('pruned')} pruned, {states.count('fail')} failed"),
        Tile(f"best {metric}", number(best["value"]), f"trial {best['number']}"),
        *(Tile(key, value_text(value)) for key, value in best["values"].items()),
        Tile("time of trials", duration_text(sum(trial["seconds"] or 0 for trial in trials))),
    ]
    sections = [
        ReportSection("search", "Search", [Charts([_parallel_chart(tree)])]),
        ReportSection("trials", "Trials", [table, Facts([("best run file", f"{folder / 'best.yaml'}")])]),
    ]
    return write_page(Page(f"Sweep of {tree['run']}", metric, "", tiles, sections), folder / REPORT)


def _parallel_chart(tree: dict[str, Any]) -> Chart:
    """A line for each trial with a finite value, over the keys of the search space."""
    axes = [
        CoordinateAxis(
            key,
            bool(space.get("log")),
            tuple(map(value_text, space.get("choices") or ())),
            (space.get("low"), space.get("high")),
        )
        for key, space in tree["space"].items()
    ]
    valued = [trial for trial in tree["trials"] if trial["value"] is not None and math.isfinite(trial["value"])]
    rows = [
        [value_text(value) if axis.choices else float(value) for axis in axes for value in [trial["values"][axis.name]]]
        + [trial["value"]]
        for trial in valued
    ]
    plot = ParallelPlot([*axes, CoordinateAxis(tree["metric"])], rows, is_maximized=tree["direction"] == "maximize")
    note = "A line is a trial; blue ones are best. Drag along an axis to keep only trials within a range."
    summary = f"{len(valued)} trials; the best is trial {tree['best']}"
    return Chart("Trials by their values", plot, summary, is_wide=True, height=340, note=note)


def value_text(value: object) -> str:
    """A value of the run file as text."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def write_range_page(folder: Path, found: dict[str, Any]) -> Path:
    """Write the report of a range test, whose `lr_range.json` holds `found`; returns the file."""
    ends = (min(found["losses"]), max(found["losses"]))
    lines = [
        Line("train/loss", found["rates"], found["losses"], role="faint"),
        Line("smoothed", found["rates"], found["smoothed"]),
        Line("steepest fall", (found["steepest"],) * 2, ends, role="dashed", colour=2),
        Line("least loss", (found["lowest"],) * 2, ends, role="dashed", colour=4),
    ]
    plot = LinePlot(lines, "learning rate", has_log_x=True)
    summary = f"steepest fall at {found['steepest']:.2e}, least loss at {found['lowest']:.2e}"
    note = "A range test sets nothing. With AdamW and warm-up it often points at too high a rate."
    chart = Chart("Loss over the learning rate", plot, summary, is_wide=True, height=380, note=note)
    section = ReportSection("curve", "Range test", [Charts([chart]), Facts(range_lines(found))])
    tiles = [Tile("steepest fall", f"{found['steepest']:.2e}"), Tile("least loss", f"{found['lowest']:.2e}")]
    return write_page(Page(f"Learning rates of {found['run']}", "train/loss", "", tiles, [section]), folder / REPORT)


def write_scaling_page(folder: Path, tree: dict[str, Any]) -> Path:
    """Write the report of a comparison, whose `scaling.json` holds `tree`; returns the file."""
    rows = tree["rows"]
    fastest = max(rows, key=lambda row: row["speedup"])
    off = f"{max(row['loss_difference'] for row in rows):.1e}"
    charts = []
    ranks = sorted({row["variant"]["ranks"] for row in rows})
    if len(ranks) > 1:
        lines = [Line("ideal", ranks, [each / rows[0]["variant"]["ranks"] for each in ranks], role="dashed", colour=7)]
        for colour, layout in enumerate(dict.fromkeys(row["variant"]["layout"] for row in rows)):
            own = sorted(
                (row["variant"]["ranks"], row["speedup"]) for row in rows if row["variant"]["layout"] == layout
            )
            x, y = zip(*own, strict=True)
            lines.append(Line(layout or "measured", x, y, role="points", colour=colour))
        charts.append(Chart("Speed-up", LinePlot(lines, "ranks"), f"up to {fastest['speedup']:.2f}"))
    curves = [
        Line(row["name"], np.arange(1, len(row["losses"]) + 1), row["losses"], colour=colour)
        for colour, row in enumerate(rows)
    ]
    charts.append(Chart("train/loss", LinePlot(curves), f"curves differ by at most {off}"))
    table = DataTable("Relative to the first row", COLUMNS, [table_row(row) for row in rows])
    section = ReportSection("table", "Comparison", [table, Charts(charts)])
    tiles = [
        Tile("fastest", fastest["name"], f"{fastest['speedup']:.2f} times {rows[0]['name']}"),
        Tile("losses differ by", off, "at most, relative"),
    ]
    warnings = [f"{name} failed: {reason}" for name, reason in tree["failed"].items()]
    page = Page(f"Scaling of {tree['run']}", "the same global batches", "", tiles, [section], warnings)
    return write_page(page, folder / REPORT)
