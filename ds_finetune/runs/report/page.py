"""The page of a report, built from one or more runs and rendered as one HTML file."""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ds_finetune import __version__
from ds_finetune.console.phase_line import time_text
from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.report.blocks import (
    NONE,
    TEMPLATES,
    Block,
    Charts,
    DataTable,
    Facts,
    Page,
    ReportSection,
    Tile,
    ago_text,
    number_text,
    render_template,
)
from ds_finetune.runs.report.charts import Line
from ds_finetune.runs.report.curves import overlay_charts, run_labels
from ds_finetune.runs.report.sections import LEADS, SECTIONS, repeat_command
from ds_finetune.runs.status import RunStatus, State
from ds_finetune.system.versions import require_extra

_UNKNOWN_FORM = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, OSError)
"""Errors that the functions of `SECTIONS` raise for files that another version wrote, or that cannot be read."""


def run_page(run: RunFolder, *, state: State | None = None, is_live: bool = False) -> Page:
    """The page of one run; `state` is the final state of a run that is ending, if its folder does not have it yet."""
    status = run.status
    if state is not None and status.state in ("running", "unknown"):
        status = replace(status, state=state, reason="" if status.state == "unknown" else status.reason)
    sections, unknown = _sections(run)
    is_told = status.reason and status.state not in ("finished", "unknown")
    subtitle = str(run.plan.get("model", run.path))
    warnings = [*_warnings(run), *unknown]
    if status.state == "running" and not is_live:
        warnings.append("the run was still running when this page was written; make it again for later steps")
    return Page(
        run.name,
        f"{subtitle}: {status.reason}" if is_told else subtitle,
        status.state if status.state != "unknown" else "",
        _tiles(run, status),
        sections,
        warnings,
    )


def _sections(run: RunFolder) -> tuple[list[ReportSection], list[str]]:
    """The sections of a run's page, and warnings for sections whose files have an unknown format."""
    sections, unknown = [], []
    for name, title, make_blocks in SECTIONS:
        try:
            blocks = make_blocks(run)
        except _UNKNOWN_FORM as error:
            reason = " ".join(str(error).split())
            unknown.append(
                f"the section {title} is left out: its files have another form than this version knows "
                f"({type(error).__name__}: {reason})"
            )
        else:
            sections += [ReportSection(name, title, blocks, LEADS.get(name, ""))] * bool(blocks)
    return sections, unknown


def overlay_page(runs: Sequence[RunFolder]) -> Page:
    """The page that compares two or more runs: results, differences of run files, and overlaid curves."""
    labels = run_labels(runs)
    named = list(zip(labels, runs, strict=True))
    differences = [row for row in _differences([run.settings for run in runs]) if row[0] != "output_dir"]
    versions = _differences([run.versions for run in runs])
    keys: list[Block] = [
        DataTable("Keys of the run files with different values", ("key", *labels), differences, len(labels) + 1)
        if differences
        else Facts([("run files", "all keys are equal, except output_dir")])
    ]
    keys += [DataTable("Versions that differ", ("package", *labels), versions, len(labels) + 1)] * bool(versions)
    charts = overlay_charts(runs)
    sections = [
        ReportSection("results", "Results", [DataTable("At the end", ("", *labels), _result_rows(runs))]),
        ReportSection("differences", "Differences of configuration", keys),
        *([ReportSection("curves", "Curves", [Charts(charts)], "Click a name to hide its line.")] if charts else []),
        ReportSection("repeat", "How to repeat the runs", [Facts([(n, repeat_command(run)) for n, run in named])]),
    ]
    warnings = [f"{label}: {text}" for label, run in named for text in _warnings(run)]
    return Page(f"{len(runs)} runs compared", ", ".join(labels), "", [], sections, warnings)


def _differences(parts: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """A row for each name whose text differs between parts; a dash stands for a missing name."""
    names = dict.fromkeys(name for part in parts for name in part)
    rows = [(name, *(part.get(name, NONE) for part in parts)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def render_page(page: Page, *, is_live: bool = False, has_figures: bool = True) -> str:
    """The page as self-contained HTML, with styles, scripts and the plot library inside.

    Its content security policy forbids all requests, and all scripts but these two. A live page, for `watch`, loads its
    scripts instead, and requests itself again without figures for the points of its charts.

    DependencyError where the extra `pages` is not installed.
    """
    charts, figures, library = list[dict[str, Any]](), list[Any](), ""
    if page.charts:
        require_extra("pages", "a page with charts")
        from ds_finetune.runs.report.figures import UNITS, bokehjs, chart_items

        for chart in page.charts:
            items = chart_items(chart) if has_figures else []
            figures += [item for item in items if not any(item is other for other in figures)]
            indices = [index for item in items for index, other in enumerate(figures) if item is other]
            lines = [_points(line) for line in chart.lines]
            unit = UNITS.get(chart.number, "")
            charts.append({"title": chart.title, "unit": unit, "figures": indices, "lines": lines})
        library = "" if is_live else bokehjs().read_text(encoding="utf-8")
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    tree = {"charts": charts, "figures": figures, "isLive": is_live}
    data = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    return render_template(
        "page.html.j2",
        is_escaped=True,
        page=page,
        version=__version__,
        is_live=is_live,
        style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=script,
        library=library,
        hashes=[_hash(text) for text in (library, script) if text],
        # The HTML parser looks for `</script` and `<!--` in JSON too.
        data=data.replace("<", "\\u003c"),
    )


def _points(line: Line) -> dict[str, Any]:
    """A line with its points as JSON, which has null for a value that is not finite."""
    x, y = ([_rounded(value) for value in np.asarray(part).tolist()] for part in (line.x, line.y))
    return {"name": line.name, "role": line.role, "x": x, "y": y}


def _rounded(value: float) -> float | None:
    """The value with six significant digits, a whole number unchanged; None for NaN and infinity."""
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


_TILES = (
    ("train/loss", "train loss", "number", "at the last step"),
    ("rollout/reward", "reward", "number", "of the last rollout"),
    ("rollout/answer_tokens", "answer length", "number", "tokens, last rollout"),
    ("train/reward_accuracy", "reward accuracy", "percent", "at the last step"),
    ("train/reward_margin", "reward margin", "number", "at the last step"),
    ("eval/reward_accuracy", "eval reward accuracy", "percent", "last evaluation"),
    ("eval/reward", "eval reward", "number", "greedy answers, last evaluation"),
    ("eval/accuracy", "eval accuracy", "percent", "last evaluation"),
    ("eval/exact_match", "exact match", "percent", "last evaluation"),
    ("memory/peak_gib", "peak memory", "gib", "of rank 0"),
)
"""Metrics whose last value gets a tile, and a row where runs are compared: label, number format and note."""


def _tiles(run: RunFolder, status: RunStatus) -> list[Tile]:
    steps = run.metrics.last_step
    planned = run.starts[-1].get("steps", 0) if run.starts else status.steps
    best, seen, seconds = run.best("eval/loss"), run.last("data/tokens_seen"), run.seconds
    tiles = [Tile("steps", f"{steps:,}", f"of {planned:,}" if planned and planned != steps else "")]
    if status.state == "running" and (eta := run.last("perf/eta_seconds")) is not None:
        phase = f"{status.phase}, " if status.phase not in ("", "step") else ""
        tiles.append(Tile("eta", time_text(eta), f"{phase}last sign {ago_text(status.updated_at)}"))
    tiles += [
        Tile(label, number_text(value, kind), note)
        for name, label, kind, note in _TILES
        if (value := run.last(name)) is not None
    ]
    tiles += [Tile("best eval loss", number_text(best[1]), f"at step {best[0]:,}")] if best is not None else []
    tiles += [Tile("tokens", _short(seen), "without padding")] if seen else []
    speed = f"{_short(seen / seconds)} tokens/s" if seen and seconds else ""
    return [*tiles, Tile("training time", time_text(seconds), speed)] if seconds else tiles


def _short(number: float) -> str:
    """A large number with three digits and a unit suffix."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _warnings(run: RunFolder) -> list[str]:
    """Warnings at the top of the page: unreadable files, a run of another version, a run without steps."""
    warnings = [text for text in (run.metrics.problem, *run.problems) if text]
    written = run.versions.get("ds_finetune", "")
    if written not in ("", "not installed", __version__):
        warnings.append(
            f"the run was written by ds_finetune {written}, and this report by {__version__}: what this version does "
            "not know is left out"
        )
    if not run.curves:
        warnings.append("no step is recorded yet")
    return warnings


def _result_rows(runs: Sequence[RunFolder]) -> list[tuple[str, ...]]:
    """Rows of the table of results, with a column for each run; rows without any value are left out."""
    best = [run.best("eval/loss") for run in runs]
    rows: list[tuple[str, ...]] = [
        ("steps", *(f"{run.metrics.last_step:,}" for run in runs)),
        *((label, *(number_text(run.last(name), kind) for run in runs)) for name, label, kind, _ in _TILES),
        ("eval loss", *(number_text(run.last("eval/loss")) for run in runs)),
        ("best eval loss", *(number_text(None if pair is None else pair[1]) for pair in best)),
        ("at step", *(number_text(None if pair is None else pair[0]) for pair in best)),
        ("tokens", *(number_text(run.last("data/tokens_seen")) for run in runs)),
        ("training time", *(time_text(run.seconds) if run.seconds else NONE for run in runs)),
        ("tokens per second", *(_speed_text(run) for run in runs)),
        ("skipped steps", *(number_text(run.last("train/skipped_steps")) for run in runs)),
        ("state", *(run.status.state for run in runs)),
    ]
    return [row for row in rows if set(row[1:]) not in ({NONE}, {"unknown"})]


def _speed_text(run: RunFolder) -> str:
    """Tokens per second over all steps of the run, or at its last step."""
    seen = run.last("data/tokens_seen")
    return number_text(seen / run.seconds if seen and run.seconds else run.last("perf/tokens_per_second"))
