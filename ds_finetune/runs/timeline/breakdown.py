"""Divides the time of optimizer steps in a rank's trace by kind of work. Each moment counts as exactly one kind."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from ds_finetune.runs.timeline.annotations import CHECKPOINT, COMPUTING, DATA, OFFLOAD, SEPARATOR, STEP, WAIT

COMPUTE, COMMUNICATION, WAITING, OTHER = "compute", "communication", "waiting", "other"
KINDS = (COMPUTE, COMMUNICATION, WAITING, DATA, OFFLOAD, CHECKPOINT, OTHER)
_KIND_OF_PHASE = {
    **dict.fromkeys(COMPUTING, COMPUTE),
    **{STEP: OTHER, DATA: DATA, OFFLOAD: OFFLOAD, CHECKPOINT: CHECKPOINT},
}
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ARROW = "ac2g"
"""Category of Kineto's arrows from a CPU call to the kernel it starts; an arrow's `id` is unique only on its rank."""
_TORCH_PREFIXES = ("gloo:", "nccl:")
"""Prefixes of torch's own events of collectives. They are left out of traces, because viewers show only events
that nest. annotations.py annotates collectives instead.
"""
_MATCHED = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "all_to_all", "all_to_allv", "barrier")
"""NCCL collectives that are matched between ranks to find who waits. Kernels of send and receive do not name both
ranks, so these are not matched.
"""
_PHASE, _COPY, _COLLECTIVE, _WAIT, _KERNEL = range(5)
"""Priorities of kinds of work, lowest first: a moment with several kinds of work counts as the kind with the highest
priority.
"""
Event = dict[str, Any]
"""An event of Chrome's trace format; times are in microseconds."""
CollectiveKey = tuple[str, int]
"""Identifies a collective on all its ranks by the group of ranks and the number of the collective in that group."""
Layer = tuple[int, str, float, float]
"""A time span in which a rank does one kind of work, as (priority, kind, begin, end) with times in microseconds. Where
spans overlap, the one with the higher priority counts.
"""


@dataclass
class RankTrace:
    """The profile of one rank: all events, and the steps, collectives and time spans of work (`layers`) that follow
    from the events. All times are of the clock of rank zero.
    """

    events: list[Event]
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    collectives: list[tuple[CollectiveKey, Event]] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)

    @property
    def starts(self) -> dict[CollectiveKey, float]:
        """Start time of each collective on this rank."""
        return {key: event["ts"] for key, event in reversed(self.collectives)}


def read_trace(tree: Mapping[str, Any], rank: int, shift: float, *, is_gpu: bool) -> RankTrace:
    """Read the trace of `rank` from the JSON of Kineto, torch's profiler. `shift` microseconds are added to all times.

    On a GPU the kernels of NCCL count as communication. On a CPU the annotated calls do, because they block the rank.
    """
    metadata = {"process_name": {"name": f"rank {rank}"}, "process_sort_index": {"sort_index": rank}}
    trace = RankTrace([{"ph": "M", "pid": rank, "tid": 0, "name": name, "args": metadata[name]} for name in metadata])
    counts = Counter[str]()
    events = [event for event in tree["traceEvents"] if isinstance(event["pid"], int) and _is_shown(event)]
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0))):
        event |= {"pid": rank, "ts": round(event["ts"] + shift, 3)}
        if event.get("cat") == _ARROW:
            event["id"] = f"{rank}.{event['id']}"
        if event.get("cat") in _DEVICE:
            _add_device_event(trace, event, counts)
        if event.get("cat") == "user_annotation":
            _add_annotation(trace, event, is_gpu=is_gpu)
        trace.events.append(event)
    return trace


def _is_shown(event: Event) -> bool:
    category, name = event.get("cat"), event["name"]
    is_host = category in _HOST or name.startswith("thread_")
    return category == _ARROW or category in _DEVICE or (is_host and not name.startswith(_TORCH_PREFIXES))


def _add_annotation(trace: RankTrace, event: Event, *, is_gpu: bool) -> None:
    name, span = event["name"], (event["ts"], event["ts"] + event["dur"])
    phase, _, number = name.partition(" ")
    if phase == STEP and number.isdecimal():
        trace.steps.append((int(number), *span))
    if kind := _KIND_OF_PHASE.get(name):
        trace.layers.append((_PHASE, OTHER if is_gpu and kind == COMPUTE else kind, *span))
    is_collective = name.count(SEPARATOR) == 3
    if (is_collective or name == WAIT) and not is_gpu:
        trace.layers.append((_COLLECTIVE, COMMUNICATION, *span))
    if not is_collective:
        return
    collective, group, count, num_bytes = name.split(SEPARATOR)
    event |= {"name": collective, "args": {"group": group, "number": int(count), "bytes": int(num_bytes)}}
    if not is_gpu:
        trace.collectives.append(((group, int(count)), event))


def _add_device_event(trace: RankTrace, event: Event, counts: Counter[str]) -> None:
    args, span = event.get("args", {}), (event["ts"], event["ts"] + event["dur"])
    if "Collective name" not in args and "nccl" not in event["name"].lower():
        is_copy = event["cat"] == "gpu_memcpy" and any(direction in event["name"] for direction in ("HtoD", "DtoH"))
        trace.layers.append((_COPY, OFFLOAD, *span) if is_copy else (_KERNEL, COMPUTE, *span))
        return
    trace.layers.append((_COLLECTIVE, COMMUNICATION, *span))
    if str(args.get("Collective name", "")).removeprefix("_").removesuffix("_base") in _MATCHED:
        group = str(args.get("Process Group Name", ""))
        counts[group] += 1
        trace.collectives.append(((group, counts[group]), event))


def mark_waits(trace: RankTrace, starts: Sequence[Mapping[CollectiveKey, float]]) -> None:
    """Add to each collective of `trace` how long its rank waited for the last rank to start the collective, and which
    rank was last. `starts` holds the start times of collectives on each rank.
    """
    latest: dict[CollectiveKey, tuple[float, int]] = {}
    for rank, each in enumerate(starts):
        for key, start in each.items():
            latest[key] = max(latest.get(key, (start, rank)), (start, rank))
    for key, event in trace.collectives:
        begin, (last, rank) = event["ts"], latest[key]
        if last > begin:
            end = min(last, begin + event["dur"])
            trace.layers.append((_WAIT, WAITING, begin, end))
            event["args"] = {**event["args"], "waited_us": round(end - begin, 3), "last_rank": rank}


def break_down(trace: RankTrace) -> list[dict[str, Any]]:
    """Divide the time of each step by kind of work. The seconds of all kinds add up to the time of the step."""
    # Spans of equal priority are sorted from long to short. Later spans replace earlier ones, so the innermost phase
    # counts.
    layers = sorted(trace.layers, key=lambda layer: (layer[0], layer[2] - layer[3]))
    return [
        {"step": number, "seconds": (end - begin) / 1e6, "categories": seconds_by_kind(begin, end, layers)}
        for number, begin, end in trace.steps
    ]


def seconds_by_kind(first: float, last: float, layers: Iterable[Layer]) -> dict[str, float]:
    """Seconds of each kind of work between the times `first` and `last` (microseconds). Where time spans of `layers`
    overlap, the span that is later in `layers` counts.
    """
    cut = [(kind, max(begin, first), min(end, last)) for _, kind, begin, end in layers if begin < last and end > first]
    edges = np.unique([first, last, *(time for _, *span in cut for time in span)])
    kinds = np.full(len(edges) - 1, KINDS.index(OTHER))
    for kind, begin, end in cut:
        kinds[np.searchsorted(edges, begin) : np.searchsorted(edges, end)] = KINDS.index(kind)
    seconds = np.bincount(kinds, np.diff(edges) / 1e6, minlength=len(KINDS))
    return dict(zip(KINDS, seconds.tolist(), strict=True))


def mean_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean seconds of a step by kind of work. `rows` are steps, or the means of ranks."""
    categories = {kind: fmean(row["categories"][kind] for row in rows) for kind in KINDS}
    return {"seconds": fmean(row["seconds"] for row in rows), "categories": categories}


def table_lines(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lines of a table with the seconds of a step by rank and kind of work."""
    yield f"{'seconds of a step':<18}" + "".join(f"{kind:>14}" for kind in ("all", *KINDS))
    for rank in ranks:
        values = (rank["mean"]["seconds"], *rank["mean"]["categories"].values())
        yield f"rank {rank['rank']:<13}" + "".join(f"{value:>14.4f}" for value in values)
