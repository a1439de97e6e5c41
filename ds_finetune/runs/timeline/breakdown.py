"""Reads the trace of one rank, and breaks its steps down: every moment counts once, as one kind of work."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from ds_finetune.engine.phases import BACKWARD, EVALUATION, FORWARD, OFFLOAD, OPTIMIZER, SAMPLING, STEP
from ds_finetune.runs.timeline.annotations import CHECKPOINT, DATA, SEPARATOR, WAIT

COMPUTE, COMMUNICATION, WAITING, OTHER = "compute", "communication", "waiting", "other"
KINDS = (COMPUTE, COMMUNICATION, WAITING, DATA, OFFLOAD, CHECKPOINT, OTHER)
_KIND_OF_PHASE = {
    **dict.fromkeys((FORWARD, BACKWARD, OPTIMIZER, EVALUATION, SAMPLING), COMPUTE),
    **{STEP: OTHER, DATA: DATA, OFFLOAD: OFFLOAD, CHECKPOINT: CHECKPOINT},
}
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_TORCHS_OWN = ("gloo:", "nccl:")
"""Prefixes of torch's own slices of collectives, which do not nest on a thread; the program annotates them already."""
_MATCHED = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "all_to_all", "all_to_allv", "barrier")
"""Names of NCCL's kernels in which all ranks of a group take part; those of messages do not name their ends."""
Event = dict[str, Any]
"""An event of Chrome's trace format; times are in microseconds."""
Span = tuple[float, float]
Meeting = tuple[str, int]
"""What the ranks of a collective call it: its group, and its number in the group."""


@dataclass
class RankTrace:
    """The events of one rank on the clock of rank zero, and its spans in them."""

    events: list[Event] = field(default_factory=list)
    steps: dict[int, Span] = field(default_factory=dict)
    phases: list[tuple[str, Span]] = field(default_factory=list)
    communication: list[tuple[Meeting | None, Event]] = field(default_factory=list)
    kernels: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)

    @property
    def starts(self) -> dict[Meeting, float]:
        """When this rank came to each collective."""
        return {meeting: event["ts"] for meeting, event in reversed(self.communication) if meeting is not None}


def read_trace(tree: Mapping[str, Any], rank: int, shift: float, *, is_gpu: bool) -> RankTrace:
    """Kineto's JSON with `shift` microseconds added to its times, as process `rank` of Chrome's format.

    On a GPU, kernels of NCCL are the communication; on a CPU, the annotated calls, which block the rank.
    """
    trace, counts = RankTrace(), Counter[str]()
    about = {"process_name": {"name": f"rank {rank}"}, "process_sort_index": {"sort_index": rank}}
    trace.events = [{"ph": "M", "pid": rank, "tid": 0, "name": name, "args": args} for name, args in about.items()]
    events = [event for event in tree["traceEvents"] if isinstance(event["pid"], int)]
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0))):
        category, name, args = event.get("cat"), event["name"], event.get("args", {})
        event |= {"pid": rank, "ts": round(event["ts"] + shift, 3)}
        if category == "ac2g":
            event["id"] = f"{rank}.{event['id']}"
        elif event["ph"] == "M" and not name.startswith("thread_"):
            continue
        elif category in _DEVICE:
            _add_device_event(trace, event, args, counts)
        elif category == "user_annotation" and not name.startswith(_TORCHS_OWN):
            _add_annotation(trace, event, is_gpu=is_gpu)
        elif event["ph"] != "M" and (category not in HOST or name.startswith(_TORCHS_OWN)):
            continue
        trace.events.append(event)
    return trace


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _add_annotation(trace: RankTrace, event: Event, *, is_gpu: bool) -> None:
    name = event["name"]
    word, _, number = name.partition(" ")
    if word == STEP and number.isdecimal():
        trace.steps[int(number)] = _span(event)
    elif name in _KIND_OF_PHASE:
        trace.phases.append((name, _span(event)))
    elif name == WAIT and not is_gpu:
        trace.communication.append((None, event))
    elif name.count(SEPARATOR) == 3:
        kind, group, count, num_bytes = name.split(SEPARATOR)
        event |= {"name": kind, "args": {"group": group, "number": int(count), "bytes": int(num_bytes)}}
        if not is_gpu:
            trace.communication.append(((group, int(count)), event))


def _add_device_event(trace: RankTrace, event: Event, args: Mapping[str, Any], counts: Counter[str]) -> None:
    if "Collective name" in args or "nccl" in event["name"].lower():
        group = str(args.get("Process Group Name", ""))
        kind = str(args.get("Collective name", "")).removeprefix("_").removesuffix("_base")
        counts[group] += kind in _MATCHED
        trace.communication.append(((group, counts[group]) if kind in _MATCHED else None, event))
    elif event["cat"] == "gpu_memcpy" and any(way in event["name"] for way in ("HtoD", "DtoH")):
        trace.copies.append(_span(event))
    else:
        trace.kernels.append(_span(event))


def mark_waits(trace: RankTrace, starts: Sequence[Mapping[Meeting, float]]) -> list[Span]:
    """The spans in which this rank waited for the rank that came last to a collective, which the event then names.

    `starts` are those of all ranks.
    """
    latest: dict[Meeting, tuple[float, int]] = {}
    for rank, each in enumerate(starts):
        for meeting, start in each.items():
            latest[meeting] = max(latest.get(meeting, (start, rank)), (start, rank))
    waits = []
    for key, event in trace.communication:
        begin, end = _span(event)
        last, rank = latest.get(key, (begin, 0)) if key is not None else (begin, 0)
        if last > begin:
            waits.append((begin, min(last, end)))
            event["args"] = {**event["args"], "waited_us": round(waits[-1][1] - begin, 3), "last_rank": rank}
    return waits


def break_down(trace: RankTrace, waits: Sequence[Span], *, is_gpu: bool) -> list[dict[str, Any]]:
    """Seconds of each step by kind, which add up to the step."""
    # The innermost phase counts, which is shorter than those around it.
    phases = sorted(trace.phases, key=lambda phase: phase[1][0] - phase[1][1])
    layers = [(_KIND_OF_PHASE[name], span) for name, span in phases]
    if is_gpu:
        layers = [(OTHER if kind == COMPUTE else kind, span) for kind, span in layers]
    layers += [(OFFLOAD, span) for span in trace.copies]
    layers += [(COMMUNICATION, _span(event)) for _, event in trace.communication]
    layers += [(WAITING, span) for span in waits] + [(COMPUTE, span) for span in trace.kernels]
    return [
        {"step": number, "seconds": (end - begin) / 1e6, "categories": seconds_by_kind((begin, end), layers)}
        for number, (begin, end) in sorted(trace.steps.items())
    ]


def seconds_by_kind(step: Span, layers: Iterable[tuple[str, Span]]) -> dict[str, float]:
    """Seconds of each kind in a step, where a later layer covers earlier ones."""
    cut = [(kind, np.clip(span, *step)) for kind, span in layers if span[0] < step[1] and span[1] > step[0]]
    edges = np.unique([*step, *(time for _, span in cut for time in span)])
    kinds = np.full(len(edges) - 1, KINDS.index(OTHER))
    for kind, (begin, end) in cut:
        kinds[np.searchsorted(edges, begin) : np.searchsorted(edges, end)] = KINDS.index(kind)
    seconds = np.bincount(kinds, np.diff(edges) / 1e6, minlength=len(KINDS))
    return dict(zip(KINDS, seconds.tolist(), strict=True))


def mean_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean seconds of steps or ranks."""
    categories = {kind: fmean(row["categories"][kind] for row in rows) for kind in KINDS}
    return {"seconds": fmean(row["seconds"] for row in rows), "categories": categories}


def table_lines(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of a table of seconds by kind and rank."""
    yield f"{'seconds of a step':<18}" + "".join(f"{kind:>14}" for kind in ("all", *KINDS))
    for rank in ranks:
        values = (rank["mean"]["seconds"], *rank["mean"]["categories"].values())
        yield f"{'rank ' + str(rank['rank']):<18}" + "".join(f"{value:>14.4f}" for value in values)
