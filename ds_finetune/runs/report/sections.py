"""The pages of reports: the sections of one run, from the files in its folder, or a comparison of several runs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np

from ds_finetune import __version__
from ds_finetune.console.phase_line import time_text
from ds_finetune.runs.folder import CONFIG, EXPERTS, LOG, PLAN, REPORT, RunFolder
from ds_finetune.runs.metrics import ROLLOUTS, SAMPLES, Curve, Sample, parse_records, read_expert_table
from ds_finetune.runs.report.charts import overlay_charts, rank_charts, run_charts, run_labels
from ds_finetune.runs.report.page import (
    NONE,
    Block,
    Charts,
    Page,
    PageSection,
    Remark,
    Table,
    Text,
    Tile,
    ago_text,
    number_text,
)
from ds_finetune.runs.status import RunStatus, State

T = TypeVar("T")
_MOST_EVENTS, _MOST_SAMPLES, _MOST_ANSWERS, _MOST_RANKS = 100, 16, 12, 64
"""Limits of a page: events of one kind, prompts or documents, answers to one prompt, and ranks in a table."""
_LONGEST_TEXT, _LONGEST_FILE = 1500, 100_000
"""Maximum number of characters that a page shows of a prompt or an answer, and of a file."""
_LOG_BYTES = 16_384
_UNREADABLE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, OSError)
"""Errors while a section of a page is made from a file that another version wrote or that cannot be read. The page is
then written without this section.
"""
_RESULTS = (
    *("train/loss", "rollout/reward", "rollout/answer_tokens", "train/reward_accuracy", "train/reward_margin"),
    *("eval/reward_accuracy", "eval/reward", "eval/accuracy", "eval/exact_match", "memory/peak_gib"),
)
"""Metrics whose last values are shown at the top of a run's page, and as results when runs are compared."""


def run_page(run: RunFolder, *, state: State | None = None, is_live: bool = False) -> Page:
    """Make the page of one run. `state` is the final state of a run that is ending. It is shown if the run's folder
    still says `running`.
    """
    status = run.status
    if state is not None and status.state in ("running", "unknown"):
        status = replace(status, state=state, reason="" if status.state == "unknown" else status.reason)
    sections, warnings = list[PageSection](), list[str]()
    for name, title, make_blocks, lead in SECTIONS:
        try:
            blocks = make_blocks(run)
        except _UNREADABLE as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            warnings.append(f"the section {title} is left out: this version cannot read its files ({reason})")
        else:
            sections += [PageSection(name, title, blocks, lead)] * bool(blocks)
    if status.state == "running" and not is_live:
        warnings.append("the run was still running when this page was written; make it again for later steps")
    subtitle = str(run.recorded(PLAN).get("model", run.path))
    if status.reason and status.state not in ("finished", "unknown"):
        subtitle = f"{subtitle}: {status.reason}"
    shown_state = status.state if status.state != "unknown" else ""
    return Page(run.name, subtitle, shown_state, _tiles(run, status), sections, [*_warnings(run), *warnings])


def overlay_page(runs: Sequence[RunFolder]) -> Page:
    """Make the page that compares runs. It shows their results, the run-file keys and package versions in which they
    differ, and their curves.
    """
    labels = run_labels(runs)
    rows = _differences([run.settings for run in runs]) + _differences([run.versions for run in runs])
    differences: list[Block] = [Table("Keys and versions that differ", ("", *labels), rows, len(labels) + 1)]
    results = [
        {tile.label: tile.value for tile in _tiles(run, status)} | {"state": status.state}
        for run, status in ((run, run.status) for run in runs)
    ]
    sections = [
        PageSection("results", "Results", [Table("At the end", ("", *labels), _rows(results))]),
        PageSection("differences", "Differences", differences if rows else [Remark("There are none.")]),
        PageSection("curves", "Curves", [Charts(overlay_charts(runs))]),
    ]
    warnings = [f"{label}: {text}" for label, run in zip(labels, runs, strict=True) for text in _warnings(run)]
    return Page(f"{len(runs)} runs compared", ", ".join(labels), "", [], sections, warnings)


def _rows(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Make the rows of a table from its columns. A column maps names of rows to texts; a missing text is a dash."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, NONE) for column in columns)) for name in names]


def _differences(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    return [row for row in _rows(columns) if len(set(row[1:])) > 1 and row[0] != "output_dir"]


def _tiles(run: RunFolder, status: RunStatus) -> list[Tile]:
    steps, planned = run.metrics.last_step, run.last_start.get("steps", status.steps)
    best, tokens = run.best("eval/loss"), run.last("data/tokens_seen")
    seconds = sum(value for _, value in run.curves.get("perf/step_seconds", Curve()).points() if math.isfinite(value))
    tiles = [Tile("steps", f"{steps:,}", f"of {planned:,}" if planned and planned != steps else "")]
    if status.state == "running" and (eta := run.last("perf/eta_seconds")) is not None:
        tiles.append(Tile("eta", time_text(eta), f"{status.phase}, last sign {ago_text(status.updated_at)}"))
    values = ((name, run.last(name)) for name in _RESULTS)
    tiles += [Tile(name, number_text(value, name)) for name, value in values if value is not None]
    tiles += [Tile("best eval/loss", number_text(best[1]), f"at step {best[0]:,}")] if best else []
    tiles += [Tile("tokens", number_text(tokens), "without padding")] if tokens else []
    tiles += [Tile("training time", time_text(seconds))] if seconds else []
    return tiles + ([Tile("tokens per second", number_text(tokens / seconds))] if tokens and seconds else [])


def _warnings(run: RunFolder) -> list[str]:
    warnings = [text for text in (run.metrics.problem, *run.problems) if text]
    written_by = run.versions.get("ds_finetune", "")
    if written_by not in ("", "not installed", __version__):
        text = f"the run was written by ds_finetune {written_by}, and this report by {__version__}"
        warnings.append(f"{text}: what this version does not know is left out")
    return warnings if run.curves else [*warnings, "no step is recorded yet"]


def _curves(run: RunFolder) -> list[Block]:
    charts = run_charts(run, [start["after_step"] for start in run.starts[1:] if "after_step" in start])
    return [Charts(charts)] if charts else []


def _ranks(run: RunFolder) -> list[Block]:
    return [Charts(charts)] if (charts := rank_charts(run)) else []


def _plan(run: RunFolder) -> list[Block]:
    plan = run.recorded(PLAN)
    notes = plan.pop("notes", [])
    table = Table("", (), [(name, str(text)) for name, text in plan.items()])
    return [*[table] * bool(plan), *(Remark(str(note)) for note in notes)]


def _events(run: RunFolder) -> list[Block]:
    starts = [
        (
            f"{datetime.fromtimestamp(start['time'], tz=UTC):%Y-%m-%d %H:%M:%S UTC}" if "time" in start else NONE,
            f"{start.get('after_step', 0):,}",
            f"{start.get('ranks', 0):,}",
            *(str(start.get(name, NONE)) for name in ("launcher", "host", "device")),
        )
        for start in run.starts[-_MOST_EVENTS:]
    ]
    columns = ("time", "after step", "ranks", "launcher", "host of rank 0", "device")
    blocks = [Table("Starts", columns, starts, 6)] if starts else []
    for caption, column, events in (
        ("Skipped steps", "first parameter with a gradient that is not finite", run.metrics.notices),
        ("Stragglers", "slow rank", run.metrics.slow),
    ):
        rows = [(f"{step:,}", text) for step, text in events[:_MOST_EVENTS]]
        first = ", the first of them" if len(events) > _MOST_EVENTS else ""
        blocks += [Table(f"{caption}: {len(events):,}{first}", ("step", column), rows, 2)] if events else []
    return [*blocks]


def _log(run: RunFolder) -> list[Block]:
    report, log = run.text(REPORT) or "", run.tail(LOG, _LOG_BYTES)
    blocks: list[Block] = [_code("Report of the watchdog", report)] * bool(report)
    return blocks + [Text("End of log.txt", [(log, False)], is_tail=True)] * bool(log)


def _profile(run: RunFolder) -> list[Block]:
    if not (summary := run.recorded("profile/summary.json")):
        return []
    kinds = [str(name) for name in summary["categories"]]
    means = [(f"rank {rank['rank']}", rank["mean"]) for rank in summary["ranks"][:_MOST_RANKS]]
    rows = [
        (name, *(f"{seconds:.4f}" for seconds in (mean["seconds"], *(mean["categories"][kind] for kind in kinds))))
        for name, mean in [*means, ("mean", summary["mean"])]
    ]
    caption = f"Mean of steps {summary['steps'][0]:,} to {summary['steps'][-1]:,}, in seconds"
    return [Table(caption, ("rank", "step", *kinds), rows)]


def _experts(run: RunFolder) -> list[Block]:
    if (path := run.file(EXPERTS)) is None:
        return []
    layers, table = read_expert_table(path)
    tenth, rows = max(len(table["counts"]) // 10, 1), []
    for part, steps in (("first", slice(0, tenth)), ("last", slice(-tenth, None))) if layers else ():
        tokens = table["counts"][steps].sum(axis=0)
        loads = tokens / np.maximum(tokens.mean(axis=1, keepdims=True), np.finfo(float).tiny)
        row, expert = np.unravel_index(int(loads.argmax()), loads.shape)
        busiest = f"{expert} of layer {layers[row]}", f"{loads.max():.2f}"
        rows.append((f"{part} tenth of the steps", *busiest, f"{int((loads == 0).sum()):,} of {loads.size:,}"))
    columns = ("", "busiest expert", "its load relative to the mean of its layer", "experts without a token")
    return [Table("", columns, rows, 2)] if rows else []


def _data(run: RunFolder) -> list[Block]:
    data = run.recorded("data.json")
    if not data:
        return []
    rows = [("training data", str(data.get("summary", NONE)))]
    rows += [(f"held-out data {name}", str(text)) for name, text in data.get("held_out", {}).items()]
    rows += [("mixture", str(line)) for line in data.get("mixture", [])]
    rows += [(str(name), str(text)) for name, text in data.get("counts", [])]
    blocks: list[Block] = [Table("", (), rows)]
    blocks += [Remark(str(note)) for note in data.get("notes", [])]
    for number, sample in enumerate(data.get("samples", [])[:_MOST_SAMPLES], start=1):
        title = " ".join(str(sample.get(part, "")) for part in ("source", "title")).strip()
        spans = [(str(text), bool(is_supervised)) for text, is_supervised in sample["spans"]]
        blocks.append(Text(f"Document {number}" + (f": {title}" if title else ""), spans))
    return blocks


def _answers(run: RunFolder) -> list[Block]:
    groups: dict[tuple[str, str], dict[int, Sample]] = {}
    for sample in parse_records(run.records(SAMPLES), _sample):
        # If a resumed run repeated a step, a prompt has several answers of that step. The last one counts.
        groups.setdefault((sample.name, sample.prompt), {})[sample.step] = sample
    return [
        Table(
            f"Prompt {number} of {name}",
            (),
            [
                ("prompt", _shortened(prompt)),
                *[
                    (f"step {step:,} {sample.scores}".strip(), _shortened(sample.answer))
                    for step, sample in _evenly_spaced([*samples.items()], _MOST_ANSWERS)
                ],
                *[("expected", _shortened(sample.expected)) for sample in [*samples.values()][-1:]],
            ],
        )
        for number, ((name, prompt), samples) in enumerate([*groups.items()][:_MOST_SAMPLES], start=1)
    ]


def _sample(record: Mapping[str, Any]) -> Sample:
    texts = {name: str(record[name]) for name in ("name", "prompt", "answer", "expected")}
    return Sample(record["step"], **texts, scores=str(record.get("scores", "")))


def _rollouts(run: RunFolder) -> list[Block]:
    return [*_evenly_spaced(parse_records(run.records(ROLLOUTS), _rollout), _MOST_SAMPLES)]


def _rollout(record: Mapping[str, Any]) -> Table:
    rows = [("prompt", _shortened(str(record["prompt"])))]
    for answer in record["answers"]:
        parts = ", ".join(f"{name} {score}" for name, score in answer["parts"].items())
        scores = f"reward {answer['reward']} ({parts}), advantage {answer['advantage']}, {answer['finish']}"
        rows.append((scores, _shortened(str(answer["text"]))))
    return Table(f"Before step {record['step']:,}", (), rows)


def _exports(run: RunFolder) -> list[Block]:
    results = {each["folder"]: each for each in run.recorded("exports.json").get("exports", [])}
    blocks: list[Block] = []
    for name, state in run.exports.items():
        result = results.get(name, {})
        blocks.append(Remark(f"{name}: {state}", {"verified": "good", "not verified": "plain"}.get(state, "bad")))
        lines = [str(line) for key in ("lines", "problems") for line in result.get(key, [])]
        lines += [str(result["skipped"])] if result.get("skipped") else []
        blocks += [_code(f"Results of verifying {name}", "\n".join(lines))] * bool(lines)
    return blocks


def _repeat(run: RunFolder) -> list[Block]:
    rows = [*run.versions.items(), ("started as", str(run.last_start.get("command", NONE)))]
    blocks: list[Block] = [Table("", (), rows)]
    if (text := run.text(CONFIG)) is not None:
        blocks.append(_code("Run file with all defaults (config.yaml)", text, is_folded=True))
    return blocks


def _code(title: str, text: str, *, is_folded: bool = False) -> Text:
    return Text(title, [(_shortened(text, _LONGEST_FILE), False)], is_folded=is_folded)


def _evenly_spaced(items: Sequence[T], most: int) -> Iterator[T]:
    indices = np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int))
    return (items[index] for index in indices.tolist())


def _shortened(text: str, most: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]} …"


SECTIONS: tuple[tuple[str, str, Callable[[RunFolder], list[Block]], str], ...] = (
    ("curves", "Curves", _curves, "Points are evaluations on held-out data, and dashed lines are restarts."),
    ("ranks", "Step times of ranks", _ranks, "Seconds of a step without the collectives."),
    ("plan", "Plan and layout", _plan, ""),
    ("events", "Starts, skipped steps and stragglers", _events, ""),
    ("log", "Log", _log, ""),
    ("profile", "Profiled steps", _profile, "Time of a step by kind of work; the timeline is profile/trace.json.gz."),
    ("experts", "Load of experts", _experts, "The load of an expert is the number of tokens sent to it."),
    ("data", "Data", _data, "The coloured text of a document is trained; other text is context without a loss."),
    ("answers", "Generated answers over time", _answers, "Greedy answers to held-out prompts at the evaluations."),
    ("rollouts", "Sampled answers and their rewards", _rollouts, ""),
    ("export", "Export and its verification", _exports, ""),
    ("repeat", "Versions and run file", _repeat, ""),
)
"""The sections of a run's page in their order. Each has a name, a heading, a function that returns its blocks, and a
sentence below the heading.

A section without blocks is left out.
"""
