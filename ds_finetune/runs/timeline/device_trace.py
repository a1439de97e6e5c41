"""What torch.profiler saw of this rank: slices for the trace, and the kernels and copies of its GPU."""

import json
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import profile

from ds_finetune.runs.timeline.clock import Span
from ds_finetune.runs.timeline.recorder import Communication, Meeting

Event = dict[str, Any]
"""An event of Chrome's trace format."""
_SLICES = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver")
_DEVICE_SLICES = ("kernel", "gpu_memcpy", "gpu_memset")
_OWN_TRACKS = ("gloo:", "nccl:")
"""Prefixes of torch's own slices of collectives, which do not nest on a thread; the recorder has them already."""
_DTYPE_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}
"""Names of dtypes in torch's traces (torch 2.13, ParamCommsUtils.hpp); those of one byte are left out."""
_MATCHED = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "all_to_all", "all_to_allv", "barrier")
"""Names of collectives in which all ranks of a group take part. Messages are not among them: their
kernels do not name sender and receiver.
"""


class Activity(NamedTuple):
    """Work of the GPU, launched by the host at `launched`; in nanoseconds."""

    span: Span
    launched: int


class TraceSlice(NamedTuple):
    """A slice of the trace on the track `track`; `is_device` tells streams of the GPU from threads of the host."""

    track: int
    is_device: bool
    name: str
    begin: int
    end: int
    args: Mapping[str, Any]


@dataclass
class DeviceTrace:
    """Slices of threads and streams, and of a GPU its kernels, copies and collectives."""

    slices: list[TraceSlice] = field(default_factory=list)
    kernels: list[Activity] = field(default_factory=list)
    copies: list[Activity] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)


def read_profile(profiler: profile, shift_ns: int) -> DeviceTrace:
    """The trace of a profiler that has stopped; `shift_ns` is added to its times, which are the system's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_text(encoding="utf-8", errors="replace")
    return read_trace(json.loads(text), shift_ns)


def read_trace(tree: Mapping[str, Any], shift_ns: int = 0) -> DeviceTrace:
    """Slices and GPU work in Kineto's JSON, whose `ts` and `dur` are microseconds from `baseTimeNanoseconds`."""
    base = int(tree.get("baseTimeNanoseconds", 0)) + shift_ns

    def span_of(event: Event) -> Span:
        begin = base + round(event["ts"] * 1000)
        return begin, begin + round(event.get("dur", 0) * 1000)

    events = [event for event in tree["traceEvents"] if event.get("ph") == "X"]
    trace = DeviceTrace()
    for event in events:
        is_device = event.get("cat") in _DEVICE_SLICES
        if is_device or (event.get("cat") in _SLICES and not event["name"].startswith(_OWN_TRACKS)):
            trace.slices.append(
                TraceSlice(int(event["tid"]), is_device, event["name"], *span_of(event), event.get("args", {}))
            )
    _read_device(trace, events, span_of, tree.get("distributedInfo", {}))
    return trace


def _read_device(
    trace: DeviceTrace, events: list[Event], span_of: Callable[[Event], Span], distributed: Mapping[str, Any]
) -> None:
    """Sort what the GPU did into kernels, copies and collectives."""
    launches = {
        event["args"]["correlation"]: span_of(event)[0]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    ranks_of = {group["pg_name"]: tuple(group["ranks"]) for group in distributed.get("pg_config", ())}
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for event in sorted((e for e in events if e.get("cat") in _DEVICE_SLICES), key=lambda e: e["ts"]):
        span, args = span_of(event), event.get("args", {})
        activity = Activity(span, launches.get(args.get("correlation"), span[0]))
        if "Collective name" in args or "nccl" in event["name"].lower():
            group = str(args.get("Process Group Name", ""))
            kind = str(args.get("Collective name", "collective")).removeprefix("_").removesuffix("_base")
            key = (group, ranks_of.get(group, ()) if kind in _MATCHED else ())
            counts[key] += 1
            num_bytes = int(args.get("In msg nelems", 0)) * _DTYPE_BYTES.get(str(args.get("dtype", "")), 1)
            made = Communication(kind, Meeting(*key, counts[key]), num_bytes, *span, launched=activity.launched)
            trace.communications.append(made)
        elif event["cat"] == "gpu_memcpy" and any(way in event["name"] for way in ("HtoD", "DtoH")):
            trace.copies.append(activity)
        else:
            trace.kernels.append(activity)


def phase_at(phases: Mapping[str, list[Span]]) -> Callable[[int], str]:
    """A function from a time to the phase whose spans hold it; empty outside of all. Spans of phases are disjoint."""
    spans = sorted((begin, end, phase) for phase, found in phases.items() for begin, end in found)
    begins = [begin for begin, _, _ in spans]

    def find(at: int) -> str:
        number = bisect_right(begins, at) - 1
        return spans[number][2] if number >= 0 and at < spans[number][1] else ""

    return find
