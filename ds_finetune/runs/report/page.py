"""The page of a report: built from one run or several, and rendered as one file of HTML."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ds_finetune import __version__
from ds_finetune.runs.report.blocks import Block, Charts, DataTable, Facts, Page, ReportSection, Tile
from ds_finetune.runs.report.curves import overlay_charts, run_labels
from ds_finetune.runs.report.differences import differing_keys
from ds_finetune.runs.report.library import PLOTS, TEMPLATES, bokehjs
from ds_finetune.runs.report.number_texts import NONE, duration_text, number_text
from ds_finetune.runs.report.run import ReportedRun
from ds_finetune.runs.report.sections import SECTIONS, repeat_command, run_seconds, seconds_text
from ds_finetune.runs.status import State

_UNKNOWN_FORM = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, OSError)
"""What files that another version wrote, or that cannot be read, raise in the functions of `SECTIONS`."""


def run_page(run: ReportedRun, *, state: State | None = None) -> Page:
    """The report of one run; `state` is that of a run which ends now, whose folder may not tell it yet."""
    status = run.folder.status
    if state is not None and status.state in ("running", "unknown"):
        status = replace(status, state=state, reason="" if status.state == "unknown" else status.reason)
    sections, unknown = _sections(run)
    reason = f": {status.reason}" if status.reason else ""
    subtitle = str(run.folder.plan.get("model", run.folder.path))
    return Page(
        run.name,
        subtitle if not reason or status.state in ("finished", "unknown") else f"{subtitle}{reason}",
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
            part = make.__name__.removesuffix("_section")
            reason = " ".join(str(error).split())
            unknown.append(
                f"the {part} section is left out: its files have another form than this version knows "
                f"({type(error).__name__}: {reason})"
            )
        else:
            sections += [] if section is None else [section]
    return sections, unknown


def overlay_page(runs: Sequence[ReportedRun]) -> Page:
    """The report of two or more runs: their results, the differences of their run files, their curves overlaid."""
    labels = run_labels(runs)
    differences = differing_keys([run.config for run in runs])
    blocks: list[Block] = [DataTable("At the end", ("", *labels), _result_rows(runs))]
    versions = _version_rows(runs)
    keys: list[Block] = [
        DataTable("Keys of the run files with different values", ("key", *labels), differences, len(labels) + 1)
        if differences
        else Facts([("run files", "all keys are equal, except output_dir")])
    ]
    keys += [DataTable("Versions that differ", ("package", *labels), versions, len(labels) + 1)] * bool(versions)
    charts = overlay_charts(runs)
    sections = [
        ReportSection("results", "Results", blocks),
        ReportSection("differences", "Differences of configuration", keys),
        *([ReportSection("curves", "Curves", [Charts(charts)], "Click a name to hide its line.")] if charts else []),
        ReportSection("repeat", "How to repeat the runs", [Facts([(n, repeat_command(r)) for n, r in _named(runs)])]),
    ]
    warnings = [f"{label}: {text}" for label, run in _named(runs) for text in _warnings(run, run.folder.status.state)]
    return Page(f"{len(runs)} runs compared", ", ".join(labels), "", [], sections, warnings)


def render_page(page: Page) -> str:
    """The page as HTML that needs nothing else: styles, scripts and the plot library are in it.

    A policy in it forbids every request, and every script but these two.
    """
    script = "".join(path.read_text(encoding="utf-8") for path in (PLOTS, TEMPLATES / "report.js"))
    library = bokehjs().read_text(encoding="utf-8") if page.charts else ""
    charts = [{"plot": chart.plot, "number": chart.number} for chart in page.charts]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["tone"] = _tone
    return environment.get_template("report.html.j2").render(
        page=page,
        version=__version__,
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
        script=script,
        library=library,
        hashes=[_hash(text) for text in (library, script) if text],
        charts=_embedded_json(charts),
    )


def _embedded_json(tree: object) -> str:
    """JSON that no text in it can end early: HTML's parser looks for `</script` and `<!--`."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _tone(state: str) -> str:
    """The colour of a state's word."""
    return {"finished": "good", "failed": "bad", "hung": "bad"}.get(state, "plain")


def _tiles(run: ReportedRun) -> list[Tile]:
    """What a reader wants to know first."""
    steps = run.metrics.last_step
    planned = run.starts[-1].get("steps", 0) if run.starts else run.folder.status.steps
    tiles = [Tile("steps", f"{steps:,}", f"of {planned:,}" if planned and planned != steps else "")]
    best = run.best("eval/loss")
    loss = run.last("train/loss")
    if loss is not None:
        tiles.append(Tile("train loss", number_text(loss), "at the last step"))
    if best is not None:
        tiles.append(Tile("best eval loss", number_text(best[1]), f"at step {best[0]:,}"))
    for name, label in (("eval/accuracy", "eval accuracy"), ("eval/exact_match", "exact match")):
        value = run.last(name)
        tiles += [] if value is None else [Tile(label, number_text(value, "percent"), "last evaluation")]
    seen = run.last("data/tokens_seen")
    tiles += [] if not seen else [Tile("tokens", _short(seen), "without padding")]
    seconds = run_seconds(run)
    if seconds:
        speed = f"{_short(seen / seconds)} tokens/s" if seen else ""
        tiles.append(Tile("training time", duration_text(seconds), speed))
    memory = run.last("memory/peak_gib")
    tiles += [] if memory is None else [Tile("peak memory", number_text(memory, "gib"), "of rank 0")]
    return tiles


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


def _named(runs: Sequence[ReportedRun]) -> list[tuple[str, ReportedRun]]:
    return list(zip(run_labels(runs), runs, strict=True))


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
                ("reward accuracy at the end", "eval/reward_accuracy", "percent"),
            )
        ),
        ("best eval loss", *(NONE if found is None else number_text(found[1]) for found in best)),
        ("at step", *(NONE if found is None else f"{found[0]:,}" for found in best)),
        ("tokens", *(number_text(run.last("data/tokens_seen")) for run in runs)),
        ("training time", *(seconds_text(run) for run in runs)),
        ("tokens per second", *(_mean_text(run, "perf/tokens_per_second") for run in runs)),
        ("peak memory of rank 0", *(number_text(run.last("memory/peak_gib"), "gib") for run in runs)),
        ("skipped steps", *(number_text(run.last("train/skipped_steps")) for run in runs)),
        ("state", *(run.folder.status.state for run in runs)),
    ]
    return [row for row in rows if set(row[1:]) not in ({NONE}, {"unknown"})]


def _mean_text(run: ReportedRun, name: str) -> str:
    """The tokens of the run over the time of its steps, or the last value of the metric."""
    seen, seconds = run.last("data/tokens_seen"), run_seconds(run)
    return number_text(seen / seconds if seen and seconds else run.last(name))


def _version_rows(runs: Sequence[ReportedRun]) -> list[tuple[str, ...]]:
    names = {name: None for run in runs for name in run.versions}
    rows = [(name, *(str(run.versions.get(name, NONE)) for run in runs)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]
