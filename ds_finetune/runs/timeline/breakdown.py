"""Breaks the time of each step of a rank down: every moment counts once, in one phase and one category.

The summary of profiled steps is JSON; docs/reference/timeline.md describes it.
"""

import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

from ds_finetune.engine.phases import BACKWARD, EVALUATION, FORWARD, OFFLOAD, OPTIMIZER, SAMPLING, STEP
from ds_finetune.runs.timeline.clock import ClockAlignment, Span, Spans, difference, intersection, seconds_in, union
from ds_finetune.runs.timeline.device_trace import Activity, DeviceTrace, phase_at
from ds_finetune.runs.timeline.recorder import CHECKPOINT, DATA, Communication, Meeting, PhaseSpan, Recorder

AFTER = "after the step"
"""The phase of what no other phase holds: metrics, logs, exports."""
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, STEP, EVALUATION, SAMPLING, CHECKPOINT, AFTER)
COMPUTE, COMMUNICATION, WAITING, OTHER = "compute", "communication", "waiting", "other"
CATEGORIES = (COMPUTE, COMMUNICATION, WAITING, DATA, OFFLOAD, CHECKPOINT, OTHER)
_COMPUTING = (FORWARD, BACKWARD, OPTIMIZER, EVALUATION, SAMPLING)
_ALWAYS = (0, 2**63)
PhaseTable = dict[str, dict[str, float]]
"""Seconds by phase and category."""
_VERSION = 1
_SUMS = ("calls", "bytes", "seconds", "waiting_seconds")
Tree = dict[str, Any]
"""A JSON object."""


@dataclass(frozen=True)
class StepTimes:
    """Where the time of one step of one rank went, in seconds.

    `hidden` is the part of `communicating`, all time with a collective under way, in which the rank computed.
    """

    step: int
    seconds: float
    table: PhaseTable
    communicating: float
    hidden: float

    def of_category(self, category: str) -> float:
        """Seconds of a category over all phases."""
        return sum(row[category] for row in self.table.values())


@dataclass(frozen=True)
class RankSpans:
    """The times of one rank by phase and by what it did."""

    phases: Mapping[str, Spans]
    """The innermost phase of each moment."""
    computing: Mapping[str, Spans]
    communicating: Mapping[str, Spans]
    """Times, by phase, in which a collective keeps the rank from computing unless `computing` says otherwise."""
    under_way: Spans
    """Times with any collective under way."""
    waiting: Spans
    offloading: Mapping[str, Spans]
    is_compute_first: bool
    """Whether a moment in `computing` and `communicating` counts as compute: on a GPU both run at the same time."""


@dataclass
class Waits:
    """How long each collective of a rank waited for the rank that came last: its time, and that rank."""

    until: dict[Meeting, tuple[int, int]] = field(default_factory=dict)

    def span(self, made: Communication) -> Span:
        """From the rank's own start to the last rank's, but not beyond the end."""
        latest = self.until.get(made.meeting, (made.begin, 0))[0]
        return made.begin, max(made.begin, min(latest, made.span[1]))


def host_spans(recorder: Recorder, waits: Waits) -> RankSpans:
    """The times of a rank that computes on its host, where a collective blocks it."""
    phases, offload = innermost(recorder.phases)
    blocked = union(recorder.blocked)
    computing = {
        phase: difference(difference(phases.get(phase, []), blocked), offload) if phase in _COMPUTING else []
        for phase in PHASES
    }
    return RankSpans(
        phases=phases,
        computing=computing,
        communicating={phase: intersection(spans, blocked) for phase, spans in phases.items()},
        # A call returns a moment after its collective ends, and blocks the rank until then.
        under_way=union([*(made.span for made in recorder.communications), *blocked]),
        waiting=union(map(waits.span, recorder.communications)),
        offloading={phase: intersection(spans, offload) for phase, spans in phases.items()},
        is_compute_first=False,
    )


def device_spans(recorder: Recorder, trace: DeviceTrace, waits: Waits) -> RankSpans:
    """The times of a rank that computes on a GPU, by the phase in which the host launched the work."""
    phases, _ = innermost(recorder.phases)
    find = phase_at(phases)

    def by_phase(done: Iterable[Activity | Communication]) -> dict[str, Spans]:
        spans: defaultdict[str, list[Span]] = defaultdict(list)
        for each in done:
            spans[find(each.launched) or AFTER].append(each.span)
        return {phase: union(found) for phase, found in spans.items()}

    return RankSpans(
        phases=phases,
        computing=by_phase(trace.kernels),
        communicating=by_phase(trace.communications),
        under_way=union(made.span for made in trace.communications),
        waiting=union(map(waits.span, trace.communications)),
        offloading=by_phase(trace.copies),
        is_compute_first=True,
    )


def innermost(phases: Sequence[PhaseSpan]) -> tuple[dict[str, Spans], Spans]:
    """Spans by phase, each moment only in the innermost one, and the times of offload traffic, which is no phase."""
    offload = union((phase.begin, phase.end) for phase in phases if phase.name == OFFLOAD)
    found: dict[str, Spans] = {phase: [] for phase in PHASES}
    taken: Spans = []
    own = [phase for phase in phases if phase.name != OFFLOAD]
    for depth in sorted({phase.depth for phase in own}, reverse=True):
        level = [phase for phase in own if phase.depth == depth]
        for name in {phase.name for phase in level}:
            spans = union((phase.begin, phase.end) for phase in level if phase.name == name)
            found[name] = union([*found[name], *difference(spans, taken)])
        taken = union([*taken, *((phase.begin, phase.end) for phase in level)])
    found[AFTER] = difference([_ALWAYS], taken)
    return found, offload


def break_down(step: int, span: Span, rank: RankSpans) -> StepTimes:
    """Every moment of `span` in the first category of the rank's order that applies to it."""
    table: PhaseTable = {phase: dict.fromkeys(CATEGORIES, 0.0) for phase in PHASES}
    left = [span]
    for phase, category, spans in _layers(rank):
        taken = intersection(left, spans)
        table[phase][category] += seconds_in(taken)
        left = difference(left, taken)
    table[AFTER][OTHER] += seconds_in(left)
    under_way = intersection([span], rank.under_way)
    computing = union(each for spans in rank.computing.values() for each in spans)
    hidden = seconds_in(intersection(under_way, computing))
    return StepTimes(step, seconds_in([span]), table, communicating=seconds_in(under_way), hidden=hidden)


def _layers(rank: RankSpans) -> Iterator[tuple[str, str, Spans]]:
    """Phase, category and times, the first of which wins."""
    compute = [(phase, COMPUTE, spans) for phase, spans in rank.computing.items()]
    if rank.is_compute_first:
        yield from compute
    for phase, spans in rank.communicating.items():
        yield phase, WAITING, intersection(spans, rank.waiting)
        yield phase, COMMUNICATION, spans
    yield from ((phase, OFFLOAD, spans) for phase, spans in rank.offloading.items())
    if not rank.is_compute_first:
        yield from compute
    own = {DATA: DATA, CHECKPOINT: CHECKPOINT}
    yield from ((phase, own.get(phase, OTHER), spans) for phase, spans in rank.phases.items())


@dataclass(frozen=True)
class ProfiledRun:
    """What a summary says of its run: the device, the layout of ranks, and the ranks that were profiled."""

    device: str
    layout: str
    world_size: int
    ranks: tuple[int, ...]

    @property
    def knows_waiting(self) -> bool:
        """Whether all ranks were profiled, so that each collective's last rank is known."""
        return len(self.ranks) == self.world_size


def summarise_rank(rank: int, alignment: ClockAlignment, steps: Sequence[StepTimes]) -> Tree:
    """Steps of one rank and their mean."""
    rows = [_step_row(step) for step in steps]
    clock = {
        "offset_seconds": alignment.last.offset / 1e9,
        "uncertainty_seconds": alignment.uncertainty_seconds,
        "drift_seconds": alignment.drift_seconds,
    }
    return {"rank": rank, "host": socket.gethostname(), "clock": clock, "steps": rows, "mean": mean_of(rows)}


def _step_row(step: StepTimes) -> Tree:
    table = {phase: row for phase, row in step.table.items() if any(row.values())}
    categories = {category: step.of_category(category) for category in CATEGORIES}
    return {
        "step": step.step,
        "seconds": step.seconds,
        "categories": categories,
        "phases": table,
        "communication": {
            "seconds": step.communicating,
            "hidden_seconds": step.hidden,
            "exposed_seconds": categories["communication"] + categories["waiting"],
        },
    }


def mean_of(rows: Sequence[Tree]) -> Tree:
    """The mean of each number of rows of one form, where a phase that a row lacks counts as zero; no `step`."""
    phases = [phase for phase in PHASES if any(phase in row["phases"] for row in rows)]
    zeros = dict.fromkeys(CATEGORIES, 0.0)
    return {
        "seconds": fmean(row["seconds"] for row in rows),
        "categories": _mean([row["categories"] for row in rows]),
        "phases": {phase: _mean([row["phases"].get(phase, zeros) for row in rows]) for phase in phases},
        "communication": _mean([row["communication"] for row in rows]),
    }


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: fmean(row[key] for row in rows) for key in rows[0]}


def collective_rows(communications: Sequence[Communication], waits: Waits, *, steps: int) -> list[Tree]:
    """For each kind, set of ranks and phase: calls, bytes, seconds and seconds of waiting, per step of one rank."""
    rows: dict[tuple[str, tuple[int, ...], str], Tree] = defaultdict(lambda: dict.fromkeys(_SUMS, 0.0))
    for made in communications:
        row = rows[made.kind, made.meeting.ranks, made.phase]
        waited = seconds_in([waits.span(made)])
        for name, value in zip(_SUMS, (1, made.num_bytes, seconds_in([made.span]), waited), strict=True):
            row[name] += value / steps
    return [{"kind": kind, "ranks": list(ranks), "phase": phase, **row} for (kind, ranks, phase), row in rows.items()]


def summarise(run: ProfiledRun, ranks: Sequence[Tree], collectives: Sequence[Sequence[Tree]]) -> Tree:
    """The summary of all profiled ranks, where collectives of the same kind, ranks and phase are averaged."""
    rows: dict[tuple[str, tuple[int, ...], str], list[Tree]] = defaultdict(list)
    for row in chain.from_iterable(collectives):
        rows[row["kind"], tuple(row["ranks"]), row["phase"]].append(row)
    merged = [{**found[0], **_mean([{name: row[name] for name in _SUMS} for row in found])} for found in rows.values()]
    return {
        "version": _VERSION,
        "steps": [row["step"] for row in ranks[0]["steps"]],
        "device": run.device,
        "layout": run.layout,
        "world_size": run.world_size,
        "profiled_ranks": list(run.ranks),
        "knows_waiting": run.knows_waiting,
        "categories": list(CATEGORIES),
        "phases": list(PHASES),
        "ranks": list(ranks),
        "mean": mean_of([rank["mean"] for rank in ranks]),
        "collectives": sorted(merged, key=lambda row: -row["seconds"]),
    }
