"""The sections of the report of one run, from what its folder holds. A function returns None for a section that would
be empty.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from ds_finetune.config.units import share_text
from ds_finetune.runs.report.blocks import (
    Block,
    Charts,
    Code,
    DataTable,
    Facts,
    MarkedText,
    Points,
    PromptAnswers,
    Remark,
    ReportSection,
)
from ds_finetune.runs.report.curves import run_charts
from ds_finetune.runs.report.experts import expert_section
from ds_finetune.runs.report.number_texts import NONE, duration_text, number_text, size_text, time_text
from ds_finetune.runs.report.profiled_steps import profile_section
from ds_finetune.runs.report.run import ReportedRun

_COMMUNICATION = "comm/"
"""Charts of these metrics, of which there are two for each kind of collective, have to be opened."""
_MOST_EVENTS = 100
_MOST_EVALUATIONS = 200
_MOST_SAMPLES = 16
_MOST_ANSWERS = 12
_LONGEST_TEXT = 1500
"""Characters of a prompt or an answer at most."""
_LONGEST_FILE = 100_000
"""Characters of a file at most."""


def plan_section(run: ReportedRun) -> ReportSection | None:
    """The plan and the layout of ranks."""
    plan = dict(run.folder.plan)
    notes = plan.pop("notes", [])
    rows = [(name, str(text)) for name, text in plan.items()] + _forecast_rows(run)
    blocks: list[Block] = [Facts(rows)] if rows else []
    blocks += [Remark(str(note)) for note in notes] if isinstance(notes, list) else []
    return ReportSection("plan", "Plan and layout", blocks) if blocks else None


def _forecast_rows(run: ReportedRun) -> list[tuple[str, str]]:
    """What was predicted of memory and time beside what was measured, where a run went so far."""
    rows = []
    expected, found = run.last("memory/predicted_gib"), run.last("memory/measured_gib")
    if expected is not None and found is not None:
        text = f"{number_text(expected, 'gib')} predicted, {number_text(found, 'gib')} measured"
        rows.append(("memory of the fullest rank", text))
    expected, steps = run.last("perf/predicted_step_seconds"), run.curves.get("perf/step_seconds")
    if expected is not None and steps is not None:
        measured = number_text(float(np.nanmedian(steps.values)), "seconds")
        rows.append(("time of a step", f"{number_text(expected, 'seconds')} predicted, {measured} measured (median)"))
    return rows


def curve_section(run: ReportedRun) -> ReportSection | None:
    """Curves with evaluations and restarts, and a table of the metrics."""
    markers = [(int(start["after_step"]), "restart") for start in _restarts(run)]
    every = run_charts(run, markers)
    if not every:
        return None
    charts = [chart for chart in every if not chart.title.startswith(_COMMUNICATION)]
    folded = [chart for chart in every if chart.title.startswith(_COMMUNICATION)]
    lead = "Points are evaluations on held-out data. Click a name to hide it; Ctrl and the wheel enlarge a part."
    blocks: list[Block] = [Charts(charts)]
    evaluations = _evaluation_table(run)
    blocks += [] if evaluations is None else [evaluations]
    blocks += [Charts(folded, "Communication of rank 0 by kind of collective")] * bool(folded)
    return ReportSection("curves", "Curves", [*blocks, _metric_table(run)], lead)


def _evaluation_table(run: ReportedRun) -> DataTable | None:
    """The evaluations, one row for each."""
    names = [name for name in run.curves if name.startswith("eval/")]
    steps = sorted({int(step) for name in names for step in run.curves[name].steps})
    if not steps:
        return None
    values = {name: dict(zip(*_lists(run, name), strict=True)) for name in names}
    shown = steps[-_MOST_EVALUATIONS:]
    rows = [(f"{step:,}", *(number_text(values[name].get(step), _kind(name)) for name in names)) for step in shown]
    return DataTable("Evaluations", ("step", *names), rows, text_columns=0, is_folded=len(rows) > 8)


def _metric_table(run: ReportedRun) -> DataTable:
    """First, last, lowest and highest value of each metric."""
    rows = []
    for name, curve in run.curves.items():
        values = curve.values
        finite = np.flatnonzero(np.isfinite(values))
        if not len(finite):
            continue
        low, high = finite[values[finite].argmin()], finite[values[finite].argmax()]
        kind = _kind(name)
        first, last = (number_text(float(values[index]), kind) for index in (finite[0], finite[-1]))
        extremes = (
            f"{number_text(float(values[index]), kind)} at {int(curve.steps[index]):,}" for index in (low, high)
        )
        rows.append((name, first, last, *extremes))
    columns = ("metric", "first", "last", "lowest", "highest")
    return DataTable("All metrics as numbers", columns, rows, is_folded=True)


def event_section(run: ReportedRun) -> ReportSection | None:
    """Starts, skipped steps and stragglers, and why the run ended."""
    blocks: list[Block] = []
    if run.starts:
        blocks.append(_start_table(run))
    skipped = run.metrics.notices
    total = run.last("train/skipped_steps")
    if skipped:
        rows = [(f"{step:,}", text) for step, text in skipped[:_MOST_EVENTS]]
        caption = f"Skipped steps: {len(skipped):,}" + (", the first of them" if len(skipped) > _MOST_EVENTS else "")
        blocks.append(DataTable(caption, ("step", "first parameter with a gradient that is not finite"), rows, 2))
    slow = run.metrics.slow[:_MOST_EVENTS]
    if slow:
        rows = [(f"{step:,}", text) for step, text in slow]
        blocks.append(DataTable(f"Stragglers: {len(run.metrics.slow):,}", ("step", "slow rank"), rows, 2))
    quiet = [] if skipped or total else ["no step was skipped"]
    quiet += [] if len(run.starts) != 1 else ["the run was not restarted"]
    quiet += [] if slow or "perf/straggler_ratio" not in run.curves else ["no rank was slow"]
    if quiet:
        text = ", ".join(quiet)
        blocks.append(Remark(f"{text[0].upper()}{text[1:]}.", "good"))
    report = run.folder.watchdog_report()
    blocks += [Code("Report of the watchdog", _shortened(report, _LONGEST_FILE))] if report else []
    return ReportSection("events", "Starts, skipped steps and stragglers", blocks) if blocks else None


def _start_table(run: ReportedRun) -> DataTable:
    rows = [
        (
            time_text(start["time"]) if isinstance(start.get("time"), int | float) else NONE,
            f"{start.get('after_step', 0):,}",
            f"{start.get('ranks', 0):,}",
            str(start.get("launcher", NONE)),
            str(start.get("host", NONE)),
            str(start.get("device", NONE)),
        )
        for start in run.starts[-_MOST_EVENTS:]
    ]
    return DataTable("Starts", ("time", "after step", "ranks", "launcher", "host of rank 0", "device"), rows, 6)


def data_section(run: ReportedRun) -> ReportSection | None:
    """A summary of the training data, and documents with their supervised tokens coloured."""
    data = run.data
    if not data:
        return None
    held_out = _texts_by_name(data.get("held_out"))
    rows = [("training data", str(data.get("summary", NONE)))]
    rows += [(name if name != "eval" else "held-out data", text) for name, text in held_out]
    rows += _used_tokens(run, data.get("tokens"))
    rows += [("mixture", str(line)) for line in data.get("mixture", [])]
    blocks: list[Block] = [Facts(rows)]
    counts = [(str(name), str(text)) for name, text in data.get("counts", [])]
    blocks += [DataTable("Counts of the training rows", ("count", "value"), counts, 2, is_folded=True)] * bool(counts)
    blocks += [Remark(str(note)) for note in data.get("notes", [])]
    samples = data.get("samples", [])[:_MOST_SAMPLES]
    for number, sample in enumerate(samples, start=1):
        title = " ".join(str(sample.get(part, "")) for part in ("source", "title")).strip()
        spans = [(str(text), bool(is_supervised)) for text, is_supervised in sample["spans"]]
        blocks.append(MarkedText(f"Document {number}" + (f": {title}" if title else ""), spans))
    lead = "The coloured text of the documents is trained; the rest is context without a loss." if samples else ""
    return ReportSection("data", "Data", blocks, lead)


def _used_tokens(run: ReportedRun, there_are: object) -> list[tuple[str, str]]:
    """The tokens that were trained on against those of the data."""
    seen = run.last("data/tokens_seen")
    if not seen or not isinstance(there_are, int) or not there_are:
        return []
    times = seen / there_are
    share = f"{share_text(times)} of" if times < 1 else f"{times:.2f} passes over"
    return [("tokens used", f"{seen:,.0f}, {share} the {there_are:,} tokens of the training data")]


def answer_section(run: ReportedRun) -> ReportSection | None:
    """What the model answered to held-out prompts over time."""
    samples = run.folder.samples
    by_prompt: dict[tuple[str, str], list[Any]] = {}
    for sample in samples:
        by_prompt.setdefault((sample.name, sample.prompt), []).append(sample)
    blocks = [
        PromptAnswers(
            f"Prompt {number}" + ("" if name == "eval" else f" of {name.removeprefix('eval/')}"),
            _shortened(prompt),
            _shortened(group[-1].expected),
            [(f"step {sample.step:,}", _shortened(sample.answer)) for sample in _spread(group)],
        )
        for number, ((name, prompt), group) in enumerate(list(by_prompt.items())[:_MOST_SAMPLES], start=1)
    ]
    lead = "Greedy answers to held-out prompts, at the evaluations of the run."
    return ReportSection("answers", "Generated answers over time", blocks, lead) if blocks else None


def checkpoint_section(run: ReportedRun) -> ReportSection | None:
    """The checkpoints that the folder holds."""
    rows = [
        (f"step {saved.step:,}", size_text(saved.num_bytes), number_text(saved.eval_loss))
        for saved in run.folder.checkpoints
    ]
    if not rows:
        return None
    return ReportSection(
        "checkpoints", "Checkpoints", [DataTable("Complete checkpoints", ("step", "size", "eval loss"), rows)]
    )


def export_section(run: ReportedRun) -> ReportSection | None:
    """The exported folders, and what verifying them found."""
    verified = {str(result["folder"]): result for result in run.exports}
    blocks: list[Block] = []
    for name, state in run.folder.exports.items():
        result = verified.get(name, {})
        is_good = state == "verified"
        blocks.append(Remark(f"{name}: {state}", "good" if is_good else "plain" if state == "not verified" else "bad"))
        lines = [str(line) for key in ("lines", "problems") for line in result.get(key, [])]
        lines += [str(result["skipped"])] if result.get("skipped") else []
        blocks += [Points(lines)] * bool(lines)
    return ReportSection("export", "Export and its verification", blocks) if blocks else None


def repeat_section(run: ReportedRun) -> ReportSection:
    """Versions, the command of the run and the command that repeats it, and its run file."""
    blocks: list[Block] = []
    if run.versions:
        blocks.append(Facts([(str(name), str(text)) for name, text in run.versions.items()]))
    if run.starts and run.starts[-1].get("command"):
        blocks.append(Code("Started as", str(run.starts[-1]["command"])))
    blocks.append(Code("Command that repeats the run", repeat_command(run)))
    config = run.folder.file("config.yaml")
    if config is not None:
        with config.open(encoding="utf-8", errors="replace") as file:
            text = _shortened(file.read(_LONGEST_FILE + 1), _LONGEST_FILE)
        blocks.append(Code("Run file with all defaults (config.yaml)", text, is_folded=True))
    return ReportSection("repeat", "Versions and how to repeat the run", blocks)


def repeat_command(run: ReportedRun) -> str:
    """A command that trains the run again, into another folder, on as many ranks."""
    folder = run.folder.path
    ranks = int(run.starts[-1].get("ranks", 1)) if run.starts else run.folder.status.ranks
    per_host = int(run.starts[-1].get("ranks_per_host", ranks)) if run.starts else ranks
    words = shlex.join([f"{folder}/config.yaml", f"output_dir={folder}-again"])
    if ranks == 1:
        return f"ds-finetune train {words}"
    if ranks == per_host:
        return f"torchrun --standalone --nproc-per-node {ranks} -m ds_finetune train {words}"
    return f"ds-finetune launch --hostfile HOSTFILE {words}   # {ranks} ranks, {per_host} on each host"


SECTIONS: tuple[Callable[[ReportedRun], ReportSection | None], ...] = (
    curve_section,
    plan_section,
    event_section,
    profile_section,
    expert_section,
    data_section,
    answer_section,
    checkpoint_section,
    export_section,
    repeat_section,
)
"""In the order of the page."""


def run_seconds(run: ReportedRun) -> float:
    """Seconds of all steps that the metrics have."""
    curve = run.curves.get("perf/step_seconds")
    return 0.0 if curve is None else float(np.nansum(curve.values))


def seconds_text(run: ReportedRun) -> str:
    """The time of the steps."""
    seconds = run_seconds(run)
    return duration_text(seconds) if seconds else NONE


def _restarts(run: ReportedRun) -> list[Mapping[str, Any]]:
    return [start for start in run.starts[1:] if isinstance(start.get("after_step"), int)]


def _spread(group: Sequence[Any]) -> Iterable[Any]:
    """The samples of a prompt, at most some of them, spread over the run; of equal steps the last."""
    latest = [list(same)[-1] for _, same in groupby(group, key=lambda sample: sample.step)]
    if len(latest) <= _MOST_ANSWERS:
        return latest
    kept = np.unique(np.linspace(0, len(latest) - 1, _MOST_ANSWERS).round().astype(int))
    return [latest[index] for index in kept.tolist()]


def _shortened(text: str, most: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]} …"


def _texts_by_name(tree: object) -> list[tuple[str, str]]:
    return [(str(name), str(text)) for name, text in tree.items()] if isinstance(tree, dict) else []


def _lists(run: ReportedRun, name: str) -> tuple[list[int], list[float]]:
    curve = run.curves[name]
    return curve.steps.tolist(), curve.values.tolist()


def _kind(name: str) -> str:
    """How the values of a metric are printed."""
    last = name.rpartition("/")[2]
    if last in ("accuracy", "exact_match", "reward_accuracy", "mfu", "mtp_accuracy"):
        return "percent"
    return "seconds" if last.endswith("_seconds") else "gib" if last.endswith("_gib") else "number"
