"""The trace of all ranks in Chrome's trace format, which Perfetto opens: a process for each rank.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_finetune.runs.timeline.breakdown import Waits
from ds_finetune.runs.timeline.device_trace import Event, TraceSlice
from ds_finetune.runs.timeline.recorder import Communication, PhaseSpan
from ds_finetune.runs.timeline.spans import Span

_PHASES, _COMMUNICATION, _THREADS, _STREAMS = 1, 10, 1000, 2000
"""First numbers of the tracks of a rank."""
_MAX_NAMED_RANKS = 8


@dataclass(frozen=True)
class RankSlices:
    """What a trace shows of one rank; times are those of its own clock."""

    rank: int
    steps: Sequence[tuple[int, Span]]
    phases: Sequence[PhaseSpan]
    communications: Sequence[Communication]
    waits: Waits
    operators: Sequence[TraceSlice]


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


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks of a group, the first of many."""
    named = ", ".join(map(str, ranks[:_MAX_NAMED_RANKS]))
    return named if len(ranks) <= _MAX_NAMED_RANKS else f"{named}, ... ({len(ranks)} ranks)"


def _args_of(made: Communication) -> dict[str, Any]:
    meeting = made.meeting
    return {
        "bytes": made.num_bytes,
        "ranks": ranks_text(meeting.ranks),
        "group": meeting.group,
        "number": meeting.number,
        "phase": made.phase,
    }


def _metadata(name: str, rank: int, args: dict[str, object], track: int = 0) -> Event:
    return {"ph": "M", "pid": rank, "tid": track, "name": name, "args": args}


def compress(events: Iterable[Event]) -> bytes:
    """Events as JSON, separated by commas, compressed by zlib."""
    return zlib.compress(",\n".join(json.dumps(event) for event in events).encode(), level=1)


def write_trace(path: Path, parts: Iterable[Iterable[bytes]]) -> None:
    """Write the trace to which each rank contributes pieces of what `compress` returned; OSError as files."""
    partial = path.with_name(path.name + ".partial")
    try:
        with gzip.open(partial, "wb", compresslevel=6) as file:
            file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, pieces in enumerate(parts):
                file.write(b",\n" if number else b"")
                _decompress(pieces, file)
            file.write(b"\n]}\n")
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _decompress(pieces: Iterable[bytes], file: gzip.GzipFile) -> None:
    decompressor = zlib.decompressobj()
    for piece in pieces:
        file.write(decompressor.decompress(piece))
    file.write(decompressor.flush())
