"""Profiles consecutive steps on the ranks of a run, and writes their trace and summary on rank zero."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ds_finetune.console.phase_line import Say
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.runs.timeline.breakdown import StepTimes, Waits, break_down, device_spans, host_spans, innermost
from ds_finetune.runs.timeline.clock import ClockAlignment, HostClock, MeasuredOffset, measure_offset
from ds_finetune.runs.timeline.device_trace import DeviceTrace, phase_at, read_profile
from ds_finetune.runs.timeline.recorder import DATA, Communication, Meeting, Recorder
from ds_finetune.runs.timeline.spans import Span
from ds_finetune.runs.timeline.summary import ProfiledRun, Tree, collective_rows, summarise, summarise_rank
from ds_finetune.runs.timeline.trace_file import RankSlices, compress, events_of, write_trace

TRACE, SUMMARY = "trace.json.gz", "summary.json"
_PIECE_BYTES = 2**20
_PATIENCE = timedelta(hours=12)
"""How long a rank waits for the parts of others; one that is lost is the watchdog's to find."""
_QUIET_LOG_LEVEL = "6"
"""Above every level of Kineto's log (torch 2.13), which prints a line to standard error whenever a profile ends."""
WrapPhases = Callable[[Recorder], AbstractContextManager[None]]


class _RankPart(NamedTuple):
    """What a profiled rank tells rank zero."""

    rank: Tree
    collectives: list[Tree]


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
        alignment = self._align()
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
        mine = compress(events) if self.is_profiled else b""
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

    def _align(self) -> ClockAlignment:
        assert self._first is not None, "`start` comes first"
        return ClockAlignment(self._first, measure_offset(self._store, self.rank, self._hosts, self._clock))

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
        return _RankPart(rank, collective_rows(communications, waits, steps=len(steps)))

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
            summary = summarise(self.run, [part.rank for part in parts], [part.collectives for part in parts])
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
