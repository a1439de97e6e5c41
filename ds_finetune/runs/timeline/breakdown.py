"""Breaks the time of each step of a rank down: every moment counts once, in one phase and one category."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_finetune.engine.phases import BACKWARD, EVALUATION, FORWARD, OFFLOAD, OPTIMIZER, STEP
from ds_finetune.runs.timeline.device_trace import Activity, DeviceTrace, phase_at
from ds_finetune.runs.timeline.recorder import CHECKPOINT, DATA, Communication, Meeting, PhaseSpan, Recorder
from ds_finetune.runs.timeline.spans import Span, Spans, difference, intersection, seconds_in, union

AFTER = "after the step"
"""The phase of what no other phase holds: metrics, logs, exports."""
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, STEP, EVALUATION, CHECKPOINT, AFTER)
COMPUTE, COMMUNICATION, WAITING, OTHER = "compute", "communication", "waiting", "other"
CATEGORIES = (COMPUTE, COMMUNICATION, WAITING, DATA, OFFLOAD, CHECKPOINT, OTHER)
_COMPUTING = (FORWARD, BACKWARD, OPTIMIZER, EVALUATION)
_ALWAYS = (0, 2**63)
PhaseTable = dict[str, dict[str, float]]
"""Seconds by phase and category."""


@dataclass(frozen=True)
class StepTimes:
    """Where the time of one step of one rank went, in seconds.

    `hidden` is the part of `communicating`, all time with a collective under way, in which the rank computed.
    """

    step: int
    begin: int
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

    def by_phase(done: Iterable[tuple[int, Span]]) -> dict[str, Spans]:
        spans: defaultdict[str, list[Span]] = defaultdict(list)
        for launched, span in done:
            spans[find(launched) or AFTER].append(span)
        return {phase: union(found) for phase, found in spans.items()}

    def activities(done: Sequence[Activity]) -> dict[str, Spans]:
        return by_phase((each.launched, each.span) for each in done)

    return RankSpans(
        phases=phases,
        computing=activities(trace.kernels),
        communicating=by_phase((made.launched, made.span) for made in trace.communications),
        under_way=union(made.span for made in trace.communications),
        waiting=union(map(waits.span, trace.communications)),
        offloading=activities(trace.copies),
        is_compute_first=True,
    )


def innermost(phases: Sequence[PhaseSpan]) -> tuple[dict[str, Spans], Spans]:
    """Spans by phase, each moment in the innermost one alone, and the times of offload traffic, which is no phase."""
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
    return StepTimes(
        step,
        span[0],
        seconds_in([span]),
        table,
        communicating=seconds_in(under_way),
        hidden=seconds_in(intersection(under_way, computing)),
    )


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
