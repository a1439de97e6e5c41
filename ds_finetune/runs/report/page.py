"""The page of a report: built from one run or several, and rendered as one file of HTML."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ds_finetune import __version__
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
    duration_text,
    number_text,
    render_template,
)
from ds_finetune.runs.report.charts import PLOTS, bokehjs
from ds_finetune.runs.report.curves import overlay_charts, run_labels
from ds_finetune.runs.report.run import ReportedRun
from ds_finetune.runs.report.sections import SECTIONS, repeat_command
from ds_finetune.runs.status import State

_UNKNOWN_FORM = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, OSError)
"""What files that another version wrote, or that cannot be read, raise in the functions of `SECTIONS`."""


def run_page(run: ReportedRun, *, state: State | None = None) -> Page:
    """The report of one run; `state` is that of a run which ends now, whose folder may not tell it yet."""
    status = run.folder.status
    if state is not None and status.state in ("running", "unknown"):
        status = replace(status, state=state, reason="" if status.state == "unknown" else status.reason)
    sections, unknown = _sections(run)
    is_told = status.reason and status.state not in ("finished", "unknown")
    subtitle = str(run.folder.plan.get("model", run.folder.path))
    return Page(
        run.name,
        f"{subtitle}: {status.reason}" if is_told else subtitle,
        status.state if status.state != "unknown" else "",
        _tiles(run),
        sections,
        [*_warnings(run, status.state), *unknown],
    )


def _sections(run: ReportedRun) -> tuple[list[ReportSection], list[str]]:
    """The sections of a run, and warnings of those whose files have a form that this version does not know."""
    sections, unknown = [], []
    for make in SECTIONS:
        try:
            section = make(run)
        except _UNKNOWN_FORM as error:
            reason = " ".join(str(error).split())
            unknown.append(
                f"the {make.__name__.removesuffix('_section')} section is left out: its files have another form than "
                f"this version knows ({type(error).__name__}: {reason})"
            )
        else:
            sections += [] if section is None else [section]
    return sections, unknown


def overlay_page(runs: Sequence[ReportedRun]) -> Page:
    """The report of two or more runs: their results, the differences of their run files, their curves overlaid."""
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
    warnings = [f"{label}: {text}" for label, run in named for text in _warnings(run, run.folder.status.state)]
    return Page(f"{len(runs)} runs compared", ", ".join(labels), "", [], sections, warnings)


def _differences(parts: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """A row for each name whose text is not the same in all parts; a dash stands for a part without the name."""
    names = dict.fromkeys(name for part in parts for name in part)
    rows = [(name, *(part.get(name, NONE) for part in parts)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def render_page(page: Page) -> str:
    """The page as HTML that needs nothing else: styles, scripts and the plot library are in it.

    A policy in it forbids every request, and every script but these two.
    """
    script = "".join(path.read_text(encoding="utf-8") for path in (PLOTS, TEMPLATES / "report.js"))
    library = bokehjs().read_text(encoding="utf-8") if page.charts else ""
    charts = [{"plot": chart.plot, "number": chart.number} for chart in page.charts]
    return render_template(
        "report.html.j2",
        is_escaped=True,
        page=page,
        version=__version__,
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=script,
        library=library,
        hashes=[_hash(text) for text in (library, script) if text],
        # HTML's parser looks for `</script` and `<!--` also in JSON.
        charts=json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _tiles(run: ReportedRun) -> list[Tile]:
    steps = run.metrics.last_step
    planned = run.starts[-1].get("steps", 0) if run.starts else run.folder.status.steps
    best, seen, seconds = run.best("eval/loss"), run.last("data/tokens_seen"), run.seconds
    speed = f"{_short(seen / seconds)} tokens/s" if seen and seconds else ""
    tiles: list[Tile | None] = [
        Tile("steps", f"{steps:,}", f"of {planned:,}" if planned and planned != steps else ""),
        _last_tile(run, "train/loss", "train loss", "number", "at the last step"),
        Tile("best eval loss", number_text(best[1]), f"at step {best[0]:,}") if best is not None else None,
        _last_tile(run, "rollout/reward", "reward", "number", "of the last rollout"),
        _last_tile(run, "eval/reward", "eval reward", "number", "greedy answers, last evaluation"),
        _last_tile(run, "eval/accuracy", "eval accuracy", "percent", "last evaluation"),
        _last_tile(run, "eval/exact_match", "exact match", "percent", "last evaluation"),
        Tile("tokens", _short(seen), "without padding") if seen else None,
        Tile("training time", duration_text(seconds), speed) if seconds else None,
        _last_tile(run, "memory/peak_gib", "peak memory", "gib", "of rank 0"),
    ]
    return [tile for tile in tiles if tile is not None]


def _last_tile(run: ReportedRun, metric: str, label: str, kind: str, note: str) -> Tile | None:
    value = run.last(metric)
    return None if value is None else Tile(label, number_text(value, kind), note)


def _short(number: float) -> str:
    """A large number with three digits and a unit."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _warnings(run: ReportedRun, state: str) -> list[str]:
    """What the reader must know about the folder: problems of its files, another version, a run that is not done."""
    warnings = [text for text in (run.metrics.problem, *run.folder.problems) if text]
    written = run.versions.get("ds_finetune", "")
    if written not in ("", "not installed", __version__):
        warnings.append(
            f"the run was written by ds_finetune {written}, and this report by {__version__}: what this version does "
            "not know is left out"
        )
    if not run.curves:
        warnings.append("no step is recorded yet")
    if state == "running":
        warnings.append("the run was still running when this page was written; make it again for later steps")
    return warnings


def _result_rows(runs: Sequence[ReportedRun]) -> list[tuple[str, ...]]:
    """Results of the runs side by side; rows that no run has are left out."""
    best = [run.best("eval/loss") for run in runs]
    rows: list[tuple[str, ...]] = [
        ("steps", *(f"{run.metrics.last_step:,}" for run in runs)),
        *(
            (label, *(number_text(run.last(name), kind) for run in runs))
            for label, name, kind in (
                ("train loss at the end", "train/loss", "number"),
                ("eval loss at the end", "eval/loss", "number"),
                ("eval accuracy at the end", "eval/accuracy", "percent"),
                ("exact match at the end", "eval/exact_match", "percent"),
                ("eval reward at the end", "eval/reward", "number"),
                ("reward accuracy at the end", "eval/reward_accuracy", "percent"),
            )
        ),
        ("best eval loss", *(NONE if found is None else number_text(found[1]) for found in best)),
        ("at step", *(NONE if found is None else f"{found[0]:,}" for found in best)),
        ("tokens", *(number_text(run.last("data/tokens_seen")) for run in runs)),
        ("training time", *(duration_text(run.seconds) if run.seconds else NONE for run in runs)),
        ("tokens per second", *(_speed_text(run) for run in runs)),
        ("peak memory of rank 0", *(number_text(run.last("memory/peak_gib"), "gib") for run in runs)),
        ("skipped steps", *(number_text(run.last("train/skipped_steps")) for run in runs)),
        ("state", *(run.folder.status.state for run in runs)),
    ]
    return [row for row in rows if set(row[1:]) not in ({NONE}, {"unknown"})]


def _speed_text(run: ReportedRun) -> str:
    """The tokens of the run over the time of its steps, or the last value of the metric."""
    seen = run.last("data/tokens_seen")
    return number_text(seen / run.seconds if seen and run.seconds else run.last("perf/tokens_per_second"))
