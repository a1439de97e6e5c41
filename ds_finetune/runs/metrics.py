"""Reads what a run appends step by step: metrics, expert loads, times of ranks, and answers."""

import json
import math
import os
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.units import MIB
from ds_finetune.runs.status import parse_object

METRICS, SAMPLES, ROLLOUTS = "metrics.jsonl", "samples.jsonl", "rollouts.jsonl"
_MOST_LINE_BYTES, _MOST_BYTES = 4 * MIB, 8 * MIB
_TAIL_BYTES = 64 * 1024
_COMPARED_BYTES = 256
_STEP = "step"
_MOST_INTEGER = 2**53


class Curve:
    """Values of one metric with their steps, in the order of the file; NaN where the run wrote null."""

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> NDArray[np.int64]:
        """Steps [n]."""
        return np.array(self._steps, dtype=np.int64)

    @property
    def values(self) -> NDArray[np.float64]:
        """Values [n]."""
        return np.array(self._values, dtype=np.float64)

    @property
    def last(self) -> float:
        """The last value."""
        return float(self._values[-1])

    def append(self, step: int, value: float) -> None:
        """Append a point."""
        self._steps.append(step)
        self._values.append(value)

    def points(self) -> list[tuple[int, float]]:
        """Steps with their values."""
        return list(zip(self._steps, self._values, strict=True))


class MetricsReader:
    """Reads a run's metrics by name, its notices by step, and its slow ranks by step.

    An incomplete last line is left for the next update. A file that was replaced, as by a resumed run, or truncated is
    read again from the beginning. Since a file that was replaced twice may have its first inode again, the end of the
    last line read is compared too. `problem` names lines that are no record of a step, which are skipped, or an
    unreadable file; it is empty otherwise.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset(0)

    def _reset(self, inode: int) -> None:
        self.curves: dict[str, Curve] = {}
        self.notices: list[tuple[int, str]] = []
        self.slow: list[tuple[int, str]] = []
        self.problem = ""
        self.last_step = 0
        self._inode, self._offset, self._num_lines, self._num_invalid = inode, 0, 0, 0
        self._line_end = b""

    def update(self) -> None:
        """Read all appended lines."""
        try:
            with self.path.open("rb") as file:
                self._read(file)
        except FileNotFoundError:
            self._reset(0)
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"

    def _read(self, file: BinaryIO) -> None:
        inode = os.fstat(file.fileno()).st_ino
        file.seek(self._offset - len(self._line_end))
        if inode != self._inode or file.read(len(self._line_end)) != self._line_end:
            self._reset(inode)
            file.seek(0)
        while (line := file.readline(_MOST_LINE_BYTES)).endswith(b"\n"):
            self._offset += len(line)
            self._line_end = line[-_COMPARED_BYTES:]
            self._add(line)
        if len(line) == _MOST_LINE_BYTES:
            self.problem = f"line {self._num_lines + 1} of {self.path.name} has more than {_MOST_LINE_BYTES:,} bytes"

    def _add(self, line: bytes) -> None:
        self._num_lines += 1
        record = _record_of(line)
        if record is None:
            self._num_invalid += 1
            self.problem = (
                f"{self._num_invalid:,} of {self._num_lines:,} lines of {self.path.name} are no records of a step "
                f"(the last is line {self._num_lines:,}): the file is damaged, or of another program or version"
            )
            return
        self.last_step = step = record.pop(_STEP)
        self.notices += [(step, str(record.pop("notice")))] if "notice" in record else []
        self.slow += [(step, str(record.pop("slow")))] if "slow" in record else []
        for name, value in record.items():
            if (number := _number(value)) is not None:
                self.curves.setdefault(name, Curve()).append(step, number)


def last_record(path: Path) -> Mapping[str, Any]:
    """The last complete record of a metrics file, read from its end; empty if there is none.

    Reads at most 64 KiB, whatever the length of the file.
    """
    lines = reversed(read_tail(path, _TAIL_BYTES).splitlines())
    return next((record for line in lines if (record := _record_of(line)) is not None), {})


def _record_of(line: bytes) -> dict[str, Any] | None:
    record = parse_object(line)
    return record if type(record.get(_STEP)) is int and 0 <= record[_STEP] < _MOST_INTEGER else None


def _number(value: object) -> float | None:
    """A metric's value as a float, NaN for null; None for other values, such as a text of a later version."""
    kind = type(value)
    if kind is float:
        return value  # type: ignore[return-value]
    if value is None:
        return math.nan
    return float(value) if kind is int and abs(value) < _MOST_INTEGER else None  # type: ignore[call-overload,arg-type]


def read_tail(path: Path, most_bytes: int) -> bytes:
    """The complete lines in the last `most_bytes` of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            start = max(os.fstat(file.fileno()).st_size - most_bytes, 0)
            tail = os.pread(file.fileno(), most_bytes, start)
    except OSError:
        return b""
    return tail[tail.find(b"\n") + 1 :] if start else tail


def read_expert_table(path: Path) -> tuple[list[int], dict[str, NDArray[Any]]]:
    """Indices of the layers with routed experts, and arrays with an entry for each line of `experts.jsonl`.

    The arrays are `step` and `num_tokens` [n], `entropy` [n, layers] and `counts` [n, layers, experts]. OSError for a
    missing file, ValueError, KeyError or TypeError for another kind of file.
    """
    records = [record for line in path.read_bytes().splitlines() if (record := _record_of(line))]
    layers = [int(layer) for layer in records[-1]["layers"]] if records else []
    names = ("step", "num_tokens", "entropy", "counts")
    return layers, {name: np.array([np.array(record[name]) for record in records]) for name in names}


def read_rank_times(path: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Steps [n] and seconds without collectives [n, ranks] from the last 8 MiB of `ranks.jsonl`; None without any.

    Lines with another number of ranks than the last one are skipped, since a run may resume on another number.
    """
    records = [times for line in read_tail(path, _MOST_BYTES).splitlines() if (times := _times_of(line)) is not None]
    if not records:
        return None
    ranks = len(records[-1][1])
    steps, seconds = zip(*((step, seconds) for step, seconds in records if len(seconds) == ranks), strict=True)
    return np.array(steps, dtype=np.int64), np.array(seconds)


def _times_of(line: bytes) -> tuple[int, list[float]] | None:
    record = _record_of(line)
    try:
        seconds = [] if record is None else [float(each) for each in record["seconds"]]
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
    return (record[_STEP], seconds) if record is not None and seconds else None


@dataclass(frozen=True)
class Sample:
    """An answer of the model after `step` to a prompt of the held-out set `name`, empty for training prompts."""

    step: int
    name: str
    prompt: str
    answer: str
    expected: str
    """Expected answer; empty if only rewards score answers."""
    scores: str = ""
    """Rewards of the answer as text, if there are any; for a training prompt also its advantage, and why it ended."""

    def line(self) -> str:
        """The sample as a line of `samples.jsonl`."""
        tree = {name: value for name, value in asdict(self).items() if value or name != "scores"}
        return json.dumps(tree, ensure_ascii=False) + "\n"


def read_rollouts(path: Path) -> list[Sample]:
    """Answers sampled to training prompts before a step, in the last 8 MiB of a file, oldest first; invalid lines are
    skipped.
    """
    return [answer for line in read_tail(path, _MOST_BYTES).splitlines() for answer in _answers_of(line)]


def _answers_of(line: bytes) -> list[Sample]:
    record = _record_of(line) or {"answers": []}
    try:
        return [
            Sample(record[_STEP], "", str(record["prompt"]), str(each["text"]), "", _scores_text(each))
            for each in record["answers"]
        ]
    except (KeyError, TypeError, AttributeError):
        return []


def _scores_text(answer: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name} {score}" for name, score in answer["parts"].items())
    return f"reward {answer['reward']} ({parts}), advantage {answer['advantage']}, {answer['finish']}"


def read_samples(path: Path) -> list[Sample]:
    """The samples in the last 8 MiB of a file, oldest first; invalid lines are skipped."""
    lines = read_tail(path, _MOST_BYTES).splitlines()
    return [sample for line in lines if (sample := _sample_of(line)) is not None]


def _sample_of(line: bytes) -> Sample | None:
    # pydantic would refuse half of a surrogate pair, which answers may contain.
    try:
        sample = Sample(**parse_object(line))
    except TypeError:
        return None
    texts = (sample.name, sample.prompt, sample.answer, sample.expected, sample.scores)
    return sample if isinstance(sample.step, int) and all(isinstance(text, str) for text in texts) else None
