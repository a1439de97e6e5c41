"""Profiles consecutive steps on the ranks of a run, and writes their trace and summary on rank zero.

The trace of all ranks has Chrome's format, which Perfetto opens: a process for each rank.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ds_finetune.console.phase_line import Say
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.runs.timeline.breakdown import (
    ProfiledRun,
    StepTimes,
    Tree,
    Waits,
    break_down,
    collective_rows,
    device_spans,
    host_spans,
    innermost,
    summarise,
    summarise_rank,
)
from ds_finetune.runs.timeline.clock import ClockAlignment, HostClock, MeasuredOffset, Span, measure_offset
from ds_finetune.runs.timeline.device_trace import DeviceTrace, Event, TraceSlice, phase_at, read_profile
from ds_finetune.runs.timeline.recorder import DATA, Communication, Meeting, PhaseSpan, Recorder

TRACE, SUMMARY = "trace.json.gz", "summary.json"
_PIECE_BYTES = 2**20
_PATIENCE = timedelta(hours=12)
"""How long a rank waits for the parts of others; one that is lost is the watchdog's to find."""
_QUIET_LOG_LEVEL = "6"
"""Above every level of Kineto's log (torch 2.13), which prints a line to standard error whenever a profile ends."""
_PHASES, _COMMUNICATION, _THREADS, _STREAMS = 1, 10, 1000, 2000
"""First numbers of the tracks of a rank in the trace."""
_MAX_NAMED_RANKS = 8
_RankPart = tuple[Tree, list[Tree]]
"""What a profiled rank tells rank zero: its steps, and its collectives."""
WrapPhases = Callable[[Recorder], AbstractContextManager[None]]


@dataclass(frozen=True)
class RankSlices:
    """What a trace shows of one rank; times are those of its own clock."""

    rank: int
    steps: Sequence[tuple[int, Span]]
    phases: Sequence[PhaseSpan]
    communications: Sequence[Communication]
    waits: Waits
    operators: Sequence[TraceSlice]


class StepProfiler:
    """Profiles steps on the ranks `run.ranks`; every rank of the run calls `start` and `finish`, which are collective.

    Clocks are compared and traces sent through `store`, so that no file system is shared. `wrap_phases` opens a
    context in which phases are recorded.
    """

    def __init__(self, run: ProfiledRun, store: dist.Store, *, clock: HostClock, wrap_phases: WrapPhases) -> None:
        self.run = run
        self.rank = dist.get_rank()
        self.recorder = Recorder(clock)
        # A connection of its own: one that waits would keep torch's own threads from asking.
        own = store.clone()  # type: ignore[attr-defined] # missing in torch's stubs
        own.set_timeout(_PATIENCE)
        self._store = dist.PrefixStore("timeline", own)
        self._clock = clock
        self._wrap_phases = wrap_phases
        self._stack = ExitStack()
        self._steps: list[tuple[int, Span]] = []
        self._number = self._began = 0
        self._hosts: list[str] = []
        self._first: MeasuredOffset | None = None
        self._profile: profile | None = None

    @property
    def is_profiled(self) -> bool:
        """Whether this rank is."""
        return self.rank in self.run.ranks

    def start(self) -> None:
        """Compare clocks, and begin to record on the ranks that are profiled."""
        self._hosts = all_gather_object(self._clock.host)
        self._first = measure_offset(self._store, self.rank, self._hosts, self._clock)
        if not self.is_profiled:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_LOG_LEVEL)
        gpu = [ProfilerActivity.CUDA] if self.run.device == "cuda" else []
        self._profile = self._stack.enter_context(profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True))
        self._stack.enter_context(self._wrap_phases(self.recorder))
        self._stack.enter_context(self.recorder.recording_collectives())

    def begin_step(self) -> None:
        """Begin a step, with its wait for data."""
        self._number, self._began = 0, self._clock.now()
        self.recorder.enter(DATA)

    def number_step(self, number: int) -> None:
        """The step that has begun is done, and was step `number` of the run; a step without a number is left out."""
        self._number = number

    def end_step(self) -> None:
        """End the step, if one has begun; on a GPU this waits for the device."""
        self.recorder.leave_all()
        if self.run.device == "cuda":
            torch.cuda.synchronize()
        if self._number:
            self._steps.append((self._number, (self._began, self._clock.now())))
        self._number = 0

    def stop(self) -> None:
        """Stop recording: nothing is wrapped any more."""
        self._stack.close()

    def finish(self, folder: Path, say: Say) -> bool:
        """End the last step, stop, and write both files to `folder` on rank zero; returns whether there were any steps.

        `say` prints where the files are, or why they could not be written. Collective.
        """
        self.end_step()
        self.stop()
        if not self._steps:
            return False
        assert self._first is not None, "`start` comes first"
        last = measure_offset(self._store, self.rank, self._hosts, self._clock)
        alignment = ClockAlignment(self._first, last)
        trace, problem = self._read()
        problems = [f"rank {rank}: {each}" for rank, each in enumerate(all_gather_object(problem)) if each]
        if problems:
            say(f"the profile of {self._steps_text()} was not written: its trace cannot be read on {problems[0]}")
            return True
        if self.is_profiled and self.run.device == "cuda" and not trace.kernels:
            say("profile: torch.profiler saw no kernel of the GPU, so nothing counts as compute; is CUPTI installed?")
        communications = self._communications(trace)
        waits, base = self._exchange_starts(communications, alignment)
        part = self._summarise(trace, waits, alignment, communications) if self.is_profiled else None
        parts = [each for each in all_gather_object(part) if each is not None]
        slices = RankSlices(self.rank, self._steps, self.recorder.phases, communications, waits, trace.slices)
        events = events_of(slices, lambda at: round((alignment.to_rank_zero(at) - base) / 1000, 3))
        text = ",\n".join(map(json.dumps, events)) if self.is_profiled else ""
        mine = zlib.compress(text.encode(), level=1)
        try:
            self._collect(folder, mine, parts)
        except OSError as full:
            say(f"the profile of {self._steps_text()} was not written to {folder}: {full.strerror or full}")
        else:
            say(f"profiled {self._steps_text()}: open {folder / TRACE} in https://ui.perfetto.dev; {folder / SUMMARY}")
        return True

    def _read(self) -> tuple[DeviceTrace, str]:
        """What torch.profiler saw, by way of a temporary file, and why that cannot be read; empty where it can."""
        profiler, self._profile = self._profile, None
        try:
            return (DeviceTrace() if profiler is None else read_profile(profiler, self._clock.shift_ns)), ""
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as failed:
            # A full disk: Kineto writes a part of its file, or none, and raises nothing.
            return DeviceTrace(), f"{type(failed).__name__}: {' '.join(str(failed).split())}"

    def _steps_text(self) -> str:
        first, last = self._steps[0][0], self._steps[-1][0]
        return f"step {first}" if first == last else f"steps {first} to {last}"

    def _communications(self, trace: DeviceTrace) -> list[Communication]:
        """Collectives that began in a profiled step, with the phase they belong to."""
        made = trace.communications if self.run.device == "cuda" else self.recorder.communications
        begin, end = self._steps[0][1][0], self._steps[-1][1][1]
        find = phase_at(innermost(self.recorder.phases)[0])
        for each in made:
            each.phase = find(each.launched or each.begin)
        return [each for each in made if begin <= each.begin <= end]

    def _exchange_starts(self, communications: Sequence[Communication], alignment: ClockAlignment) -> tuple[Waits, int]:
        """How long this rank waited in each collective, where all ranks that take part were profiled; and the time at
        which the first rank began.
        """
        mine = {made.meeting: alignment.to_rank_zero(made.begin) for made in communications}
        began = alignment.to_rank_zero(self._steps[0][1][0])
        every = all_gather_object((mine if self.is_profiled else {}, began))
        latest: dict[Meeting, list[tuple[int, int]]] = {}
        for rank, (starts, _) in enumerate(every):
            for meeting, start in starts.items():
                latest.setdefault(Meeting(*meeting), []).append((start, rank))
        until = {
            made.meeting: (made.begin + max(found)[0] - mine[made.meeting], max(found)[1])
            for made in communications
            if len(found := latest[made.meeting]) == len(set(made.meeting.ranks))
        }
        return Waits(until), min(start for _, start in every)

    def _summarise(
        self, trace: DeviceTrace, waits: Waits, alignment: ClockAlignment, communications: Sequence[Communication]
    ) -> _RankPart:
        is_gpu = self.run.device == "cuda"
        spans = device_spans(self.recorder, trace, waits) if is_gpu else host_spans(self.recorder, waits)
        steps: list[StepTimes] = [break_down(number, span, spans) for number, span in self._steps]
        rank = summarise_rank(self.rank, alignment, steps)
        return rank, collective_rows(communications, waits, steps=len(steps))

    def _collect(self, folder: Path, mine: bytes, parts: Sequence[_RankPart]) -> None:
        """Send this rank's part of the trace to rank zero, which writes the files."""
        if self.rank:
            if self.is_profiled:
                self._send(mine)
            return
        traces: list[Iterator[bytes]] = [iter([mine]) if rank == 0 else self._receive(rank) for rank in self.run.ranks]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_trace(folder / TRACE, traces)
            summary = summarise(self.run, [rank for rank, _ in parts], [collectives for _, collectives in parts])
            (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        finally:
            # Ranks whose part nobody has asked for wait until it is.
            for trace in traces:
                for _ in trace:
                    pass

    def _send(self, mine: bytes) -> None:
        self._store.wait([f"send/{self.rank}"])
        pieces = [mine[at : at + _PIECE_BYTES] for at in range(0, len(mine), _PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self._store.set(f"part/{self.rank}/{number}", piece)  # type: ignore[arg-type] # std::string takes bytes
        self._store.set(f"parts/{self.rank}", str(len(pieces)))

    def _receive(self, rank: int) -> Iterator[bytes]:
        """The pieces that a rank sends once it is asked to."""
        self._store.set(f"send/{rank}", "")
        count = int(self._store.get(f"parts/{rank}"))
        for key in (f"part/{rank}/{number}" for number in range(count)):
            yield self._store.get(key)
            self._store.delete_key(key)
        for key in (f"send/{rank}", f"parts/{rank}"):
            self._store.delete_key(key)


def events_of(rank: RankSlices, microseconds: Callable[[int], float]) -> Iterator[Event]:
    """The events of a rank; `microseconds` is from a time of its clock to one of the trace."""

    def slice_of(track: int, name: str, span: Span, args: dict[str, Any] | None = None) -> Event:
        begin, end = microseconds(span[0]), microseconds(span[1])
        event = {"ph": "X", "pid": rank.rank, "tid": track, "name": name, "ts": begin, "dur": round(end - begin, 3)}
        return event | ({"args": args} if args else {})

    tracks = {_PHASES: "phases"}
    yield _metadata("process_name", rank.rank, {"name": f"rank {rank.rank} ({socket.gethostname()})"})
    yield _metadata("process_sort_index", rank.rank, {"sort_index": rank.rank})
    for number, span in rank.steps:
        yield slice_of(_PHASES, f"step {number}", span)
    for phase in rank.phases:
        yield slice_of(_PHASES, phase.name, (phase.begin, phase.end))
    for lane, made in lanes(rank.communications):
        track = _COMMUNICATION + lane
        tracks[track] = f"communication {lane}" if lane else "communication"
        yield slice_of(track, made.kind, made.span, _args_of(made))
        waited = rank.waits.span(made)
        if waited[1] > waited[0]:
            slowest = rank.waits.until[made.meeting][1]
            yield slice_of(track, f"waiting for rank {slowest}", waited)
    # Kineto numbers threads as the kernel does, where the main thread has the process's number.
    keys = dict.fromkeys([(False, os.getpid()), *((each.is_device, each.track) for each in rank.operators)])
    numbers = {key: number for number, key in enumerate(keys)}
    for each in rank.operators:
        number = numbers[each.is_device, each.track]
        track = (_STREAMS if each.is_device else _THREADS) + number
        name = f"GPU stream {each.track}" if each.is_device else f"thread {each.track}"
        tracks[track] = name if number else "main thread"
        yield slice_of(track, each.name, (each.begin, each.end), dict(each.args))
    for track, name in tracks.items():
        yield _metadata("thread_name", rank.rank, {"name": name}, track)
        yield _metadata("thread_sort_index", rank.rank, {"sort_index": track}, track)


def lanes(communications: Iterable[Communication]) -> Iterator[tuple[int, Communication]]:
    """Each collective with the number of a lane in which no two are under way at the same time."""
    free_at: list[int] = []
    for made in sorted(communications, key=lambda made: made.span):
        begin, end = made.span
        lane = next((lane for lane, free in enumerate(free_at) if free <= begin), len(free_at))
        free_at[lane : lane + 1] = [end]
        yield lane, made


def _args_of(made: Communication) -> dict[str, Any]:
    group, ranks, number = made.meeting
    named = ", ".join(map(str, ranks[:_MAX_NAMED_RANKS]))
    text = named if len(ranks) <= _MAX_NAMED_RANKS else f"{named}, ... ({len(ranks)} ranks)"
    return {"bytes": made.num_bytes, "ranks": text, "group": group, "number": number, "phase": made.phase}


def _metadata(name: str, rank: int, args: dict[str, object], track: int = 0) -> Event:
    return {"ph": "M", "pid": rank, "tid": track, "name": name, "args": args}


def write_trace(path: Path, parts: Iterable[Iterable[bytes]]) -> None:
    """Write the trace, to which each rank contributes pieces of its events: JSON separated by commas, compressed by
    zlib. OSError as files.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with gzip.open(partial, "wb", compresslevel=6) as file:
            file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, pieces in enumerate(parts):
                file.write(b",\n" if number else b"")
                decompressor = zlib.decompressobj()
                file.writelines(map(decompressor.decompress, pieces))
                file.write(decompressor.flush())
            file.write(b"\n]}\n")
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
