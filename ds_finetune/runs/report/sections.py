"""The sections of a run's page, from the files in its folder."""

import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.units import bytes_text, share_text
from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.metrics import Sample
from ds_finetune.runs.report.blocks import (
    NONE,
    Block,
    Charts,
    Code,
    DataTable,
    Facts,
    MarkedText,
    PromptAnswers,
    Remark,
    number_text,
)
from ds_finetune.runs.report.charts import Chart, HeatMap
from ds_finetune.runs.report.curves import rank_chart, run_charts

T = TypeVar("T")
_COMMUNICATION = "comm/"
"""Prefix of metrics whose charts are collapsed at first: there are two for each kind of collective."""
_MOST_EVENTS = 100
_MOST_EVALUATIONS = 200
_MOST_SAMPLES = 16
_MOST_ANSWERS = 12
_LONGEST_TEXT = 1500
"""Maximum characters of a prompt or an answer."""
_LONGEST_FILE = 100_000
"""Maximum characters of a file."""
_MOST_RANKS = 64
"""Maximum rows on profiled steps."""
_MOST_CELLS = 16_384
"""Maximum cells of a heat map of loads: DeepSeek-V3 has 58 layers of 256 experts."""
_MOST_COLUMNS = 60
_ROW_PIXELS, _MANY_ROWS, _ROW_PIXELS_OF_MANY = 18, 24, 10
_FRAME_PIXELS, _LEAST_PIXELS, _MOST_PIXELS = 90, 180, 1200


def _plan(run: RunFolder) -> list[Block]:
    plan = dict(run.plan)
    notes = plan.pop("notes", [])
    rows = [(name, str(text)) for name, text in plan.items()]
    expected, measured = run.last("memory/predicted_gib"), run.last("memory/measured_gib")
    if expected is not None and measured is not None:
        text = f"{number_text(expected, 'gib')} predicted, {number_text(measured, 'gib')} measured"
        rows.append(("memory of the fullest rank", text))
    blocks: list[Block] = [Facts(rows)] if rows else []
    blocks += [Remark(str(note)) for note in notes] if isinstance(notes, list) else []
    return blocks


def _curves(run: RunFolder) -> list[Block]:
    markers = [(start["after_step"], "restart") for start in run.starts[1:] if "after_step" in start]
    all_charts = run_charts(run, markers)
    if not all_charts:
        return []
    charts = [chart for chart in all_charts if not chart.title.startswith(_COMMUNICATION)] + rank_chart(run)
    folded = [chart for chart in all_charts if chart.title.startswith(_COMMUNICATION)]
    blocks: list[Block] = [Charts(charts), *_evaluation_table(run)]
    blocks += [Charts(folded, "Communication of rank 0 by kind of collective")] * bool(folded)
    return [*blocks, _metric_table(run)]


def _evaluation_table(run: RunFolder) -> list[DataTable]:
    values = {name: dict(curve.points()) for name, curve in run.curves.items() if name.startswith("eval/")}
    steps = sorted({step for of_metric in values.values() for step in of_metric})
    rows = [
        (f"{step:,}", *(number_text(values[name].get(step), _kind(name)) for name in values))
        for step in steps[-_MOST_EVALUATIONS:]
    ]
    table = DataTable("Evaluations", ("step", *values), rows, text_columns=0, is_folded=len(rows) > 8)
    return [table] * bool(rows)


def _metric_table(run: RunFolder) -> DataTable:
    rows = []
    for name, curve in run.curves.items():
        values = curve.values
        finite = np.flatnonzero(np.isfinite(values))
        if not len(finite):
            continue
        indices = (finite[0], finite[-1], finite[values[finite].argmin()], finite[values[finite].argmax()])
        first, last, *extremes = (number_text(float(values[index]), _kind(name)) for index in indices)
        steps = [int(curve.steps[index]) for index in indices[2:]]
        rows.append((name, first, last, *(f"{text} at {step:,}" for text, step in zip(extremes, steps, strict=True))))
    columns = ("metric", "first", "last", "lowest", "highest")
    return DataTable("All metrics as numbers", columns, rows, is_folded=True)


def _events(run: RunFolder) -> list[Block]:
    blocks: list[Block] = [_start_table(run)] if run.starts else []
    skipped, slow = run.metrics.notices, run.metrics.slow
    if skipped:
        caption = f"Skipped steps: {len(skipped):,}" + (", the first of them" if len(skipped) > _MOST_EVENTS else "")
        blocks.append(_event_table(caption, "first parameter with a gradient that is not finite", skipped))
    if slow:
        blocks.append(_event_table(f"Stragglers: {len(slow):,}", "slow rank", slow))
    quiet = [] if skipped or run.last("train/skipped_steps") else ["no step was skipped"]
    quiet += [] if len(run.starts) != 1 else ["the run was not restarted"]
    quiet += [] if slow or "perf/straggler_ratio" not in run.curves else ["no rank was slow"]
    if quiet:
        text = ", ".join(quiet)
        blocks.append(Remark(f"{text[0].upper()}{text[1:]}.", "good"))
    return blocks


def _event_table(caption: str, column: str, events: Sequence[tuple[int, str]]) -> DataTable:
    return DataTable(caption, ("step", column), [(f"{step:,}", text) for step, text in events[:_MOST_EVENTS]], 2)


def _start_table(run: RunFolder) -> DataTable:
    rows = [
        (
            f"{datetime.fromtimestamp(start['time'], tz=UTC):%Y-%m-%d %H:%M:%S UTC}" if "time" in start else NONE,
            f"{start.get('after_step', 0):,}",
            f"{start.get('ranks', 0):,}",
            *(str(start.get(name, NONE)) for name in ("launcher", "host", "device")),
        )
        for start in run.starts[-_MOST_EVENTS:]
    ]
    return DataTable("Starts", ("time", "after step", "ranks", "launcher", "host of rank 0", "device"), rows, 6)


def _data(run: RunFolder) -> list[Block]:
    data = run.data
    if not data:
        return []
    held_out = data.get("held_out")
    rows = [("training data", str(data.get("summary", NONE)))]
    for name, text in held_out.items() if isinstance(held_out, dict) else ():
        rows.append(("held-out data" if name == "eval" else str(name), str(text)))
    rows += _used_tokens(run, data.get("tokens"))
    rows += [("mixture", str(line)) for line in data.get("mixture", [])]
    blocks: list[Block] = [Facts(rows)]
    counts = [(str(name), str(text)) for name, text in data.get("counts", [])]
    blocks += [DataTable("Counts of the training rows", ("count", "value"), counts, 2, is_folded=True)] * bool(counts)
    blocks += [Remark(str(note)) for note in data.get("notes", [])]
    samples = data.get("samples", [])[:_MOST_SAMPLES]
    about = "The coloured text of the documents is trained; the rest is context without a loss."
    blocks += [Remark(about)] * bool(samples)
    for number, sample in enumerate(samples, start=1):
        title = " ".join(str(sample.get(part, "")) for part in ("source", "title")).strip()
        spans = [(str(text), bool(is_supervised)) for text, is_supervised in sample["spans"]]
        blocks.append(MarkedText(f"Document {number}" + (f": {title}" if title else ""), spans))
    return blocks


def _used_tokens(run: RunFolder, num_tokens: object) -> list[tuple[str, str]]:
    seen = run.last("data/tokens_seen")
    if not seen or not isinstance(num_tokens, int) or not num_tokens:
        return []
    times = seen / num_tokens
    used = f"{share_text(times)} of" if times < 1 else f"{times:.2f} passes over"
    return [("tokens used", f"{seen:,.0f}, {used} the {num_tokens:,} tokens of the training data")]


def _answers(run: RunFolder) -> list[Block]:
    by_prompt: dict[tuple[str, str], list[Sample]] = {}
    for sample in run.samples:
        by_prompt.setdefault((sample.name, sample.prompt), []).append(sample)
    return [
        PromptAnswers(
            f"Prompt {number}" + ("" if name == "eval" else f" of {name.removeprefix('eval/')}"),
            _shortened(prompt),
            _shortened(group[-1].expected),
            [
                (f"step {sample.step:,} {sample.scores}".strip(), _shortened(sample.answer))
                # The last of several samples at a step.
                for sample in _spread([*{sample.step: sample for sample in group}.values()], _MOST_ANSWERS)
            ],
        )
        for number, ((name, prompt), group) in enumerate(list(by_prompt.items())[:_MOST_SAMPLES], start=1)
    ]


def _rollouts(run: RunFolder) -> list[Block]:
    by_prompt: dict[tuple[int, str], list[Sample]] = {}
    for answer in run.rollouts:
        by_prompt.setdefault((answer.step, answer.prompt), []).append(answer)
    return [
        PromptAnswers(
            f"Before step {step:,}",
            _shortened(prompt),
            "",
            [(answer.scores, _shortened(answer.answer)) for answer in group],
        )
        for (step, prompt), group in _spread([*by_prompt.items()], _MOST_SAMPLES)
    ]


def _log(run: RunFolder) -> list[Block]:
    log, report = run.log_tail(), run.watchdog_report()
    blocks: list[Block] = [Code("Report of the watchdog", _shortened(report, _LONGEST_FILE))] * bool(report)
    return blocks + [Code("End of log.txt", log, is_tail=True)] * bool(log)


def _checkpoints(run: RunFolder) -> list[Block]:
    rows = [
        (f"step {saved.step:,}", bytes_text(saved.num_bytes), number_text(saved.eval_loss)) for saved in run.checkpoints
    ]
    return [DataTable("Complete checkpoints", ("step", "size", "eval loss"), rows)] * bool(rows)


def _exports(run: RunFolder) -> list[Block]:
    results = [each for each in run.recorded("exports.json").get("exports", []) if isinstance(each, dict)]
    verified = {str(result["folder"]): result for result in results if "folder" in result}
    blocks: list[Block] = []
    for name, state in run.exports.items():
        result = verified.get(name, {})
        blocks.append(Remark(f"{name}: {state}", {"verified": "good", "not verified": "plain"}.get(state, "bad")))
        lines = [str(line) for key in ("lines", "problems") for line in result.get(key, [])]
        lines += [str(result["skipped"])] if result.get("skipped") else []
        blocks += [Code(f"What verifying {name} found", "\n".join(lines))] * bool(lines)
    return blocks


def _repeat(run: RunFolder) -> list[Block]:
    blocks: list[Block] = []
    if run.versions:
        blocks.append(Facts(list(run.versions.items())))
    if run.starts and run.starts[-1].get("command"):
        blocks.append(Code("Started as", str(run.starts[-1]["command"])))
    blocks.append(Code("Command that repeats the run", repeat_command(run)))
    if (text := run.text("config.yaml")) is not None:
        title = "Run file with all defaults (config.yaml)"
        blocks.append(Code(title, _shortened(text, _LONGEST_FILE), is_folded=True))
    return blocks


def repeat_command(run: RunFolder) -> str:
    """A command that repeats the run in another folder, with as many ranks."""
    folder = run.path
    ranks = int(run.starts[-1].get("ranks", 1)) if run.starts else run.status.ranks
    per_host = int(run.starts[-1].get("ranks_per_host", ranks)) if run.starts else ranks
    arguments = shlex.join([f"{folder}/config.yaml", f"output_dir={folder}-again"])
    if ranks == 1:
        return f"ds-finetune train {arguments}"
    if ranks == per_host:
        return f"torchrun --standalone --nproc-per-node {ranks} -m ds_finetune train {arguments}"
    return f"ds-finetune launch --hostfile HOSTFILE {arguments}   # {ranks} ranks, {per_host} on each host"


def _spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly spread, with the first and the last one."""
    indices = np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int))
    return [items[index] for index in indices.tolist()]


def _shortened(text: str, most: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]} …"


def _kind(name: str) -> str:
    last = name.rpartition("/")[2]
    if last in ("accuracy", "exact_match", "reward_accuracy", "mfu", "mtp_accuracy"):
        return "percent"
    return "seconds" if last.endswith("_seconds") else "gib" if last.endswith("_gib") else "number"


def _profile(run: RunFolder) -> list[Block]:
    summary = run.recorded("profile/summary.json")
    if not summary:
        return []
    categories = [str(name) for name in summary["categories"]]
    named = [(f"rank {rank['rank']}", rank["mean"]) for rank in summary["ranks"][:_MOST_RANKS]]
    rows = [
        (
            name,
            f"{mean['seconds']:.4f}",
            *(f"{mean['categories'][category]:.4f}" for category in categories),
        )
        for name, mean in [*named, ("mean", summary["mean"])]
    ]
    caption = f"Mean of steps {summary['steps'][0]:,} to {summary['steps'][-1]:,}, in seconds"
    return [DataTable(caption, ("rank", "step", *categories), rows)]


def expert_charts(run: RunFolder) -> list[Block]:
    """Heat maps of expert loads; empty for a run without routed experts."""
    if (table := run.experts) is None:
        return []
    layers, loads = table
    counts, steps = loads["counts"].astype(np.float64), loads["step"]
    tenth = max(len(counts) // 10, 1)
    row = _ROW_PIXELS if len(layers) <= _MANY_ROWS else _ROW_PIXELS_OF_MANY
    height = int(np.clip(_FRAME_PIXELS + row * len(layers), _LEAST_PIXELS, _MOST_PIXELS))
    parts = {"first": slice(0, tenth), "last": slice(len(counts) - tenth, len(counts))}
    maps = list[tuple[str, HeatMap, str]]()
    if len(layers) * counts.shape[2] <= _MOST_CELLS:
        for part, records in parts.items():
            begin, end = steps[records][[0, -1]]
            span = f"steps {begin:,} to {end:,}" if tenth > 1 else f"step {begin:,}"
            title = f"Load of each expert, {part} tenth ({span})"
            maps.append((title, *_load_map(relative_loads(counts[records]), layers)))
    title = "Busiest expert of each layer over the run (largest load over the mean, less 1)"
    maps.append((title, *_violation_map(counts, layers, steps)))
    charts = [
        Chart(title, (), summary, heat_map=heat_map, is_wide=True, height=height, note=summary)
        for title, heat_map, summary in maps
    ]
    return [Charts(charts)]


def relative_loads(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Loads [layers, experts] relative to the layer's mean load, from counts [steps, layers, experts].

    Loads are 0 for a layer without tokens.
    """
    total = counts.sum(axis=0)
    mean = total.mean(axis=1, keepdims=True)
    return np.divide(total, mean, out=np.zeros_like(total), where=mean > 0)


def _load_map(loads: NDArray[np.float64], layers: list[int]) -> tuple[HeatMap, str]:
    """Heat map of relative loads [layers, experts] on a scale of 1/4 to 4, and its summary."""
    row, expert = np.unravel_index(int(loads.argmax()), loads.shape)
    summary = (
        f"The busiest expert is {expert} of layer {layers[row]}, with {loads.max():.2f} times the mean load; "
        f"{int((loads == 0).sum()):,} of {loads.size:,} experts had no token."
    )
    experts = [str(expert) for expert in range(loads.shape[1])]
    ticks = ((-2.0, "1/4"), (0.0, "mean load"), (2.0, "4x"))
    shades = np.log2(np.clip(loads, 0.25, 4.0))
    return HeatMap("expert", experts, layers, loads, shades, ticks, is_diverging=True), summary


def _violation_map(counts: NDArray[np.float64], layers: list[int], steps: NDArray[Any]) -> tuple[HeatMap, str]:
    """Heat map of each layer's MaxVio (equation 4 of arXiv 2408.15664) over spans of steps, and its summary."""
    spans = np.array_split(np.arange(len(counts)), min(len(counts), _MOST_COLUMNS))
    values = np.maximum(np.array([relative_loads(counts[span]).max(axis=1) - 1 for span in spans]).T, 0.0)
    least_even = int(values[:, -1].argmax())
    summary = (
        f"At the end layer {layers[least_even]} is the least even one: its busiest expert has "
        f"{values[:, -1].max() + 1:.2f} times the mean load."
    )
    top = max(round(float(values.max()), 2), 0.1)
    columns = [f"{int(steps[span[0]]):,}" for span in spans]
    return HeatMap("step", columns, layers, values, values, ((0.0, "0"), (top, f"{top:g}"))), summary


SECTIONS: tuple[tuple[str, str, Callable[[RunFolder], list[Block]]], ...] = (
    ("curves", "Curves", _curves),
    ("plan", "Plan and layout", _plan),
    ("events", "Starts, skipped steps and stragglers", _events),
    ("log", "Log", _log),
    ("profile", "Profiled steps", _profile),
    ("experts", "Load of experts", expert_charts),
    ("data", "Data", _data),
    ("answers", "Generated answers over time", _answers),
    ("rollouts", "Sampled answers and their rewards", _rollouts),
    ("checkpoints", "Checkpoints", _checkpoints),
    ("export", "Export and its verification", _exports),
    ("repeat", "Versions and how to repeat the run", _repeat),
)
"""Sections in the order of the page: name, heading, and function that returns the blocks; none without blocks."""
LEADS = {
    "curves": "Points are evaluations on held-out data. Click a name to hide it; drag over a part to enlarge it.",
    "profile": "Seconds of a step by what the rank was doing; open profile/trace.json.gz in Perfetto for the timeline.",
    "experts": "The load of an expert is the number of tokens sent to it. Colours show it relative to the mean of its "
    "layer: grey is the mean, blue less and orange more.",
    "answers": "Greedy answers to held-out prompts, at the evaluations of the run.",
    "rollouts": "Answers that the model sampled to training prompts, and how they were scored.",
}
"""Sentences below the headings of sections, by name."""
