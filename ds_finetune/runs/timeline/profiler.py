"""Profiles consecutive steps of a run on some ranks. Rank zero writes one trace and one table of all these ranks.

The trace is in Chrome's format, with a process per rank, and can be opened in Perfetto.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
import os
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ds_finetune.console.phase_line import Say
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.runs.timeline.annotations import STEP, Annotations
from ds_finetune.runs.timeline.breakdown import KINDS, break_down, mark_waits, mean_of, read_trace, table_lines
from ds_finetune.system.processes import boot_id
from ds_finetune.system.whole_file import replace_file

TRACE, SUMMARY = "trace.json.gz", "summary.json"
_VERSION = 2
_PATIENCE = timedelta(hours=12)
"""Maximum time that a rank waits for an answer through the store. The watchdog detects dead ranks earlier."""
_QUIET_LOG_LEVEL = "6"
"""Log level that silences Kineto (torch 2.13), which otherwise writes a line to standard error when a profile ends."""
_MOST_RANKS = 8
_ROUND_TRIPS = 20
WrapPhases = Callable[[Annotations], AbstractContextManager[None]]


@dataclass(frozen=True)
class ProfiledRun:
    """Facts about a profiled run that `summary.json` repeats: device, layout of ranks, and the profiled ranks."""

    device: str
    layout: str
    world_size: int
    profiled_ranks: tuple[int, ...]

    @property
    def knows_waiting(self) -> bool:
        """Whether all ranks were profiled. Otherwise it is unknown how long a rank waited in a collective for the last
        rank.
        """
        return len(self.profiled_ranks) == self.world_size


class StepProfiler:
    """Profiles steps on the ranks `run.profiled_ranks`. Every rank of the run must call `start` and `finish`.

    Hosts compare their clocks through `store`, and ranks send their traces to rank zero, so that no shared file system
    is needed. `wrap` opens a context in which phases are annotated.
    """

    def __init__(self, run: ProfiledRun, store: dist.Store, *, clock: "HostClock", wrap: WrapPhases) -> None:
        self._run, self._clock, self._wrap = run, clock, wrap
        self._annotations = Annotations()
        # The profiler has its own connection to the store, because waiting on a shared one would block torch's own
        # threads.
        own_store = store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
        own_store.set_timeout(_PATIENCE)
        self._store = dist.PrefixStore("timeline", own_store)
        self._recording, self._step = ExitStack(), ExitStack()
        self._profile: profile | None = None
        self.steps: list[int] = []
        """Numbers of the optimizer steps that were profiled."""
        self.is_finished = False

    def start(self) -> None:
        """Start recording, if this rank is one that is profiled."""
        if dist.get_rank() in self._run.profiled_ranks:
            os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_LOG_LEVEL)
            gpu = [ProfilerActivity.CUDA] if self._run.device == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)
            for recorder in (self._profile, self._wrap(self._annotations), self._annotations.on_collectives()):
                self._recording.enter_context(recorder)

    def begin_step(self, number: int) -> None:
        """Begin to record step `number` of the run. The step begins with its wait for data."""
        self._step.enter_context(record_function(f"{STEP} {number}"))
        self._step.callback(self._annotations.end_data)
        self._annotations.begin_data()

    def end_step(self) -> None:
        """End the record of the step. On a GPU, wait for the device first."""
        if self._run.device == "cuda":
            torch.cuda.synchronize()
        self._step.close()

    def stop(self) -> None:
        """Stop recording, and remove all wrappers of functions."""
        self._step.close()
        self._recording.close()

    def finish(self, folder: Path, say: Say) -> None:
        """Stop profiling after at least one step. Rank zero then writes the trace and the summary to `folder`.
        Collective.

        `say` prints the paths of these files and the table, or the reason why they could not be written.
        """
        self.end_step()
        self._recording.close()
        self.is_finished, rank = True, dist.get_rank()
        text = f"steps {self.steps[0]} to {self.steps[-1]}" if len(self.steps) > 1 else f"step {self.steps[0]}"
        clock = measure_offset(self._store, self._clock)
        tree, problem = self._read()
        problems = [f"rank {other}: {each}" for other, each in enumerate(all_gather_object(problem)) if each]
        if problems:
            say(f"the profile of {text} was not written: its trace cannot be read on {problems[0]}")
            return
        base = tree["baseTimeNanoseconds"] + self._clock.shift_ns + clock.offset
        shift, is_gpu = (base - max(all_gather_object(base))) / 1000, self._run.device == "cuda"
        trace = read_trace(tree, rank, shift, is_gpu=is_gpu)
        if is_gpu and trace.steps and all(event.get("cat") != "kernel" for event in trace.events):
            say("profile: torch.profiler saw no kernel of the GPU, so nothing counts as compute; is CUPTI installed?")
        if self._run.knows_waiting:
            mark_waits(trace, all_gather_object(trace.starts))
        rows = [row for row in break_down(trace) if row["step"] in self.steps]
        part: dict[str, Any] = {
            "rank": rank,
            "host": socket.gethostname(),
            "clock": {f"{name}_seconds": nanoseconds / 1e9 for name, nanoseconds in clock._asdict().items()},
            "steps": rows,
        }
        parts = [part | {"mean": mean_of(part["steps"])} for part in all_gather_object(part) if part["steps"]]
        traces = self._traces(zlib.compress(",\n".join(map(json.dumps, trace.events)).encode(), level=1))
        problem = self._write(folder, traces, parts) if rank == 0 else ""
        # `_traces` broadcasts from each profiled rank, so every rank exhausts it, even rank zero after a write error.
        for _ in traces:
            pass
        lines = [f"profiled {text}: open {folder / TRACE} in https://ui.perfetto.dev; {folder / SUMMARY}"]
        lines += table_lines(parts[:_MOST_RANKS])
        for line in [f"the profile of {text} was not written to {folder}: {problem}"] if problem else lines:
            say(line)

    def _read(self) -> tuple[dict[str, Any], str]:
        profiler, self._profile = self._profile, None
        if profiler is None:
            return {"traceEvents": [], "baseTimeNanoseconds": 0}, ""
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                return json.loads(path.read_text(encoding="utf-8", errors="replace")), ""
        except (OSError, ValueError, RuntimeError) as failed:
            # On a full disk Kineto writes part of its file, or none, and raises no error.
            return {}, f"{type(failed).__name__}: {' '.join(str(failed).split())}"

    def _traces(self, own_trace: bytes) -> Iterator[bytes]:
        """Yield the traces of the profiled ranks, one after another. Collective: every rank must exhaust the
        iterator.
        """
        for rank in self._run.profiled_ranks:
            trace = [own_trace if rank == dist.get_rank() else b""]
            dist.broadcast_object_list(trace, src=rank)
            yield trace[0]

    def _write(self, folder: Path, traces: Iterator[bytes], parts: Sequence[Mapping[str, Any]]) -> str:
        """Write the trace and the summary of the profile; returns an error message, empty on success."""
        partial = folder / f"{TRACE}.partial"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with gzip.open(partial, "wb", compresslevel=6) as file:
                file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
                for number, trace in enumerate(traces):
                    file.write(b",\n" * bool(number) + zlib.decompress(trace))
                file.write(b"\n]}\n")
            partial.rename(folder / TRACE)
            summary = {"version": _VERSION, "steps": self.steps, **asdict(self._run), "categories": KINDS}
            summary |= {"knows_waiting": self._run.knows_waiting, "ranks": parts}
            summary["mean"] = mean_of([part["mean"] for part in parts])
            replace_file(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
        except OSError as full:
            return full.strerror or str(full)
        finally:
            with suppress(OSError):
                partial.unlink()
        return ""


@dataclass(frozen=True)
class HostClock:
    """The clock of this process's host. `shift_ns` simulates a wrong clock in tests."""

    host: str = field(default_factory=lambda: boot_id() or socket.gethostname())
    """Identifies the clock: the same text for all processes that share it."""
    shift_ns: int = 0

    def now(self) -> int:
        """The time of this clock in nanoseconds since 1970."""
        return time.time_ns() + self.shift_ns


class MeasuredOffset(NamedTuple):
    """The difference between the clock of a host and that of rank zero's host. A time of the host plus `offset`
    nanoseconds is a time of rank zero's host, with an error of at most `uncertainty` nanoseconds.

    Hosts ask rank zero for its time through the ranks' store. An answer is wrong by at most half the round trip, so the
    shortest of several round trips is used (Cristian, "Probabilistic clock synchronization", 1989).
    """

    uncertainty: int = 0
    offset: int = 0


def measure_offset(store: dist.Store, clock: HostClock) -> MeasuredOffset:
    """Measure how far `clock` is from the clock of rank zero. Collective; the first rank of each host measures for all
    ranks of the host.
    """
    rank, hosts = dist.get_rank(), all_gather_object(clock.host)
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts) if host != hosts[0]]
    measured = MeasuredOffset()
    if rank == 0:
        for trip in (f"{leader}/{number}" for leader in leaders for number in range(_ROUND_TRIPS)):
            store.wait([f"asked/{trip}"])
            store.set(f"answered/{trip}", str(clock.now()))
    elif rank in leaders:
        measured = min(_ask(store, f"{rank}/{trip}", clock) for trip in range(_ROUND_TRIPS))
    return all_gather_object(measured)[hosts.index(hosts[rank])]


def _ask(store: dist.Store, trip: str, clock: HostClock) -> MeasuredOffset:
    asked = clock.now()
    store.set(f"asked/{trip}", "")
    answer = int(store.get(f"answered/{trip}").decode())
    answered = clock.now()
    return MeasuredOffset((answered - asked + 1) // 2, answer - (asked + answered) // 2)
