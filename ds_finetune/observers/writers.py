"""Writes the files of a run that get a line per step or answer: `metrics.jsonl`, `ranks.jsonl` and `samples.jsonl`.

A line is appended completely or not at all, so that a full disk leaves no incomplete line. While the disk is full,
lines wait in memory and training continues.
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
from ds_finetune.runs.metrics import Sample, record_of

T = TypeVar("T")
Record = tuple[int, Mapping[str, float]]
"""The number of an optimizer step, and its finite metrics by name."""
MAX_WAITING = 10_000
"""Maximum number of records that wait in memory to be written. Beyond it, the oldest are dropped."""
_LONGEST_PAUSE = 16
MOST_SAMPLES = 8
"""An evaluation saves answers to this number of prompts per held-out set, always the first ones, for comparison."""


def one_line(failed: Exception) -> str:
    """First line of an exception's message."""
    text = (getattr(failed, "strerror", None) or str(failed)).strip()
    return text.splitlines()[0][:300] if text else type(failed).__name__


class Outage(Generic[T]):
    """Passes records to `write` in order. If `write` raises OSError, the record and later ones wait in memory and are
    tried again.

    At most `most` records wait, by default `MAX_WAITING`. `say` prints a line when writing fails, when it works again,
    and at the end if records were lost.
    """

    def __init__(self, name: str, write: Callable[[T], None], say: Say, *, most: int | None = None) -> None:
        self._name, self._write, self._say = name, write, say
        self._most = MAX_WAITING if most is None else most
        self._waiting: deque[T] = deque()
        self._lost = 0
        self._pause = self._until_next = 0

    def put(self, record: T) -> None:
        """Write the records that wait, and then `record`. If that fails, `record` waits too."""
        self._waiting.append(record)
        if len(self._waiting) > self._most:
            self._waiting.popleft()
            self._lost += 1
        self._until_next -= 1
        if self._until_next <= 0:
            self._try()

    def close(self) -> None:
        """Try once more to write the records that wait, and report how many were lost."""
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
    """Append `data` to an unbuffered file. If that raises OSError, no part of `data` remains in the file."""
    end, written = file.seek(0, os.SEEK_END), 0
    try:
        while written < len(data):
            written += file.write(data[written:])
    except OSError:
        file.truncate(end)
        raise


class LineFile:
    """File to which lines are appended without delay; while the disk is full, they wait in memory."""

    def __init__(self, path: Path, say: Say, *, most: int | None = None) -> None:
        self._file = path.open("ab", buffering=0)
        self._lines = Outage(str(path), partial(append_whole, self._file), say, most=most)

    def put(self, line: str) -> None:
        """Append `line`, which ends with a newline, to the file."""
        self._lines.put(line.encode(errors="replace"))

    def close(self) -> None:
        """Write the lines that wait in memory, and close the file."""
        self._lines.close()
        self._file.close()


class MetricsFile(LineFile):
    """Writes `metrics.jsonl`, a JSON object per step; `non_finite` lists NaN and infinite metrics, which are null."""

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the metrics of the step as a line of `metrics.jsonl`."""
        self.put(line_of(record))
        return record


class RankTimesFile(LineFile):
    """Writes `ranks.jsonl`: the step times of all ranks, without collectives, at the steps at which they were gathered.

    A line is `{"step": 10, "seconds": [0.41, 0.43]}`, with the seconds in the order of ranks.
    """

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the step times of all ranks if the record has them."""
        if record.rank_seconds:
            seconds = [float(f"{each:.4g}") for each in record.rank_seconds]
            self.put(json.dumps({"step": record.step, "seconds": seconds}) + "\n")
        return record


def line_of(record: StepRecord) -> str:
    """Format the record of a step as a line of `metrics.jsonl`."""
    finite = {name: value if math.isfinite(value) else None for name, value in record.values.items()}
    non_finite = (
        {"non_finite": [name for name, value in finite.items() if value is None]} if None in finite.values() else {}
    )
    texts = {name: text for name, text in (("notice", record.notice), ("slow", record.slow)) if text}
    return json.dumps({"step": record.step, **finite, **non_finite, **texts}) + "\n"


def read_records(path: Path) -> list[Record]:
    """Read the steps in `metrics.jsonl` with their finite values; empty if the file is missing."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = [record for line in lines if (record := record_of(line)) is not None]
    return [
        (record.pop("step"), {name: value for name, value in record.items() if isinstance(value, int | float)})
        for record in records
    ]


class SampleFile(LineFile):
    """Writes `samples.jsonl`: a line for each answer that an evaluation generated, with the step of the evaluation."""

    def __init__(self, path: Path, say: Say) -> None:
        super().__init__(path, say)
        self._collected: Sequence[Sample] = ()

    def collect(self, samples: Sequence[Sample]) -> None:
        """Keep the answers of an evaluation until `after_step` writes them with its step number."""
        self._collected = samples

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the answers that `collect` has received, with the number of this step."""
        for sample in self._collected:
            self.put(replace(sample, step=record.step).line())
        self._collected = ()
        return record
