"""Writes the files with a record per step: `metrics.jsonl`, `ranks.jsonl` and `samples.jsonl`.

A record is appended completely or not at all, so that a full disk leaves no incomplete record. While the disk is full,
records are queued and training continues.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Generic, TypeVar

from ds_finetune.console.phase_line import Say
from ds_finetune.observers.record import StepRecord
from ds_finetune.runs.metrics import Sample

T = TypeVar("T")
Record = tuple[int, Mapping[str, float]]
"""A step, and its finite values by name."""
MAX_WAITING = 10_000
"""Maximum number of queued lines; the oldest are dropped."""
_LONGEST_PAUSE = 16
MOST_SAMPLES = 8
"""Number of answers of each held-out set that an evaluation saves; always the first ones, for comparison over time."""


def one_line(failed: Exception) -> str:
    """The first line of an exception's message."""
    text = (getattr(failed, "strerror", None) or str(failed)).strip()
    return text.splitlines()[0][:300] if text else type(failed).__name__


class Outage(Generic[T]):
    """Passes records to `write` in order. When a record raises OSError, it and later ones are queued and retried.

    At most `most` records are queued, by default `MAX_WAITING`. `say` prints a line when writing fails, when it works
    again, and at the end for lost records.
    """

    def __init__(self, name: str, write: Callable[[T], None], say: Say, *, most: int | None = None) -> None:
        self._name, self._write, self._say = name, write, say
        self._most = MAX_WAITING if most is None else most
        self._waiting: deque[T] = deque()
        self._lost = 0
        self._pause = self._until_next = 0

    def put(self, record: T) -> None:
        """Write the queued records and this one, or queue it."""
        self._waiting.append(record)
        if len(self._waiting) > self._most:
            self._waiting.popleft()
            self._lost += 1
        self._until_next -= 1
        if self._until_next <= 0:
            self._try()

    def close(self) -> None:
        """Write queued records a last time, and report what could not be written."""
        if self._waiting:
            self._try()
        if self._waiting:
            self._lost += len(self._waiting)
            self._say(f"{self._name} LACKS {self._lost} RECORDS, which could not be written")

    def _try(self) -> None:
        waited = len(self._waiting) - 1
        try:
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as full:
            if not self._pause:
                self._say(f"{self._name} CANNOT BE WRITTEN: {one_line(full)}; training continues, and its records wait")
            self._pause = min(max(2 * self._pause, 1), _LONGEST_PAUSE)
            self._until_next = self._pause
            return
        if self._pause:
            lost = f"; {self._lost} were lost before, because at most {self._most} wait" if self._lost else ""
            self._say(f"{self._name} is written again, with {waited} records that had waited{lost}")
        self._pause = 0


def append_whole(file: FileIO, data: bytes) -> None:
    """Append `data` to an unbuffered file; after an OSError no part of it remains."""
    end, written = file.seek(0, os.SEEK_END), 0
    try:
        while written < len(data):
            written += file.write(data[written:])
    except OSError:
        file.truncate(end)
        raise


class LineFile:
    """A file to which lines are appended at once; on a full disk they are queued (`Outage`)."""

    def __init__(self, path: Path, say: Say, *, most: int | None = None) -> None:
        self._file = path.open("ab", buffering=0)
        self._lines = Outage(str(path), partial(append_whole, self._file), say, most=most)

    def put(self, line: str) -> None:
        """Append a line, which ends with a newline."""
        self._lines.put(line.encode(errors="replace"))

    def close(self) -> None:
        """Write queued lines and close the file."""
        self._lines.close()
        self._file.close()


class MetricsFile(LineFile):
    """Writes one JSON object per optimizer step; NaN and infinity become null, their names are in `non_finite`."""

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the record."""
        self.put(line_of(record))
        return record


class RankTimesFile(LineFile):
    """Writes `ranks.jsonl`: step times of all ranks without collectives, at the steps at which stragglers are searched.

    A line is `{"step": 10, "seconds": [0.41, 0.43]}`, in the order of ranks.
    """

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the times of the ranks if the record has them."""
        if record.rank_seconds:
            seconds = [float(f"{each:.4g}") for each in record.rank_seconds]
            self.put(json.dumps({"step": record.step, "seconds": seconds}) + "\n")
        return record


def line_of(record: StepRecord) -> str:
    """The JSON line of a record."""
    finite = {name: value if math.isfinite(value) else None for name, value in record.values.items()}
    non_finite = (
        {"non_finite": [name for name, value in finite.items() if value is None]} if None in finite.values() else {}
    )
    texts = {name: text for name, text in (("notice", record.notice), ("slow", record.slow)) if text}
    return json.dumps({"step": record.step, **finite, **non_finite, **texts}) + "\n"


class SampleFile(LineFile):
    """Writes the answers generated in an evaluation, one per line, with the step after which they were generated."""

    def __init__(self, path: Path, say: Say) -> None:
        super().__init__(path, say)
        self._collected: Sequence[Sample] = ()

    def collect(self, samples: Sequence[Sample]) -> None:
        """Keep the answers of an evaluation until its step is recorded; their own `step` is replaced then."""
        self._collected = samples

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the collected answers."""
        for sample in self._collected:
            self.put(replace(sample, step=record.step).line())
        self._collected = ()
        return record
