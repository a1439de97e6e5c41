"""Readers of the files of a run folder to which training appends lines of JSON, such as `metrics.jsonl`."""

import json
import math
import os
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.units import MIB
from ds_finetune.runs.status import parse_object

T = TypeVar("T")
METRICS, SAMPLES, ROLLOUTS = "metrics.jsonl", "samples.jsonl", "rollouts.jsonl"
_MOST_LINE_BYTES = 4 * MIB
_COMPARED_BYTES = 256
_STEP = "step"
_MOST_INTEGER = 2**53


class Curve:
    """The values of one metric and their steps, in the order of `metrics.jsonl`. A null in that file becomes NaN."""

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps at which the metric has its n values, int64 [n]."""
        return np.array(self._steps, dtype=np.int64)

    @property
    def values(self) -> NDArray[np.float64]:
        """The n values of the metric, fp64 [n]."""
        return np.array(self._values, dtype=np.float64)

    @property
    def last(self) -> float:
        """The value of the metric at its last recorded step."""
        return float(self._values[-1])

    def append(self, step: int, value: float) -> None:
        """Append the value of the metric at a later step."""
        self._steps.append(step)
        self._values.append(value)

    def points(self) -> list[tuple[int, float]]:
        """The values of the metric as pairs of step and value."""
        return list(zip(self._steps, self._values, strict=True))


class MetricsReader:
    """Reads the file `metrics.jsonl` of a run while the run appends to it.

    `curves` holds the values by name of the metric. `notices` and `slow` hold messages about steps and about slow
    ranks, each with its step. `problem` says which lines could not be read; it is empty if all could.

    An incomplete last line is left for a later update. If the file was replaced or truncated, e.g. because the run
    resumed from an earlier checkpoint, it is read again from its beginning. The reader detects another file by its
    inode and by the end of the last line that was read, because a new file may get the inode of the old one.
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
        """Read all lines of the file that were appended since the last update."""
        try:
            with self.path.open("rb") as file:
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
                number = self._num_lines + 1
                self.problem = f"line {number} of {self.path.name} has more than {_MOST_LINE_BYTES:,} bytes"
        except FileNotFoundError:
            self._reset(0)
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"

    def _add(self, line: bytes) -> None:
        self._num_lines += 1
        record = record_of(line)
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
            # NaN is null in JSON.
            if value is None or isinstance(value, float) or (type(value) is int and abs(value) < _MOST_INTEGER):
                self.curves.setdefault(name, Curve()).append(step, math.nan if value is None else float(value))


def record_of(line: str | bytes) -> dict[str, Any] | None:
    """Parse a line of JSON as the metrics of a step; None unless the key `step` is an integer of at most 53 bits."""
    record = parse_object(line)
    return record if type(record.get(_STEP)) is int and 0 <= record[_STEP] < _MOST_INTEGER else None


def parse_records(records: Iterable[dict[str, Any]], parse: Callable[[dict[str, Any]], T]) -> list[T]:
    """Apply `parse` to each record, and return the results. Records that `parse` cannot read are skipped."""
    results = list[T]()
    for record in records:
        with suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            results.append(parse(record))
    return results


def read_expert_table(path: Path) -> tuple[list[int], dict[str, NDArray[Any]]]:
    """Read `experts.jsonl`, the loads of routed experts over n recorded steps. Returns the indices of the layers with
    routed experts, and a dictionary of arrays.

    The arrays are `step` and `num_tokens` [n], `entropy` [n, layers] and `counts` [n, layers, experts]. Raises OSError
    if the file is missing, and ValueError, KeyError or TypeError if it has other content.
    """
    records = [record for line in path.read_bytes().splitlines() if (record := record_of(line))]
    layers = [int(layer) for layer in records[-1]["layers"]] if records else []
    names = ("step", "num_tokens", "entropy", "counts")
    return layers, {name: np.array([np.array(record[name]) for record in records]) for name in names}


@dataclass(frozen=True)
class Sample:
    """The model's answer to a held-out prompt after optimizer step `step`. `name` is the held-out set, such as `eval`
    or `eval/math`.

    `expected` is the answer in the held-out row; it is empty if only reward functions judge answers. `scores` is a text
    with the rewards of the model's answer, empty without reward functions.
    """

    step: int
    name: str
    prompt: str
    answer: str
    expected: str
    scores: str = ""

    def line(self) -> str:
        """Format the sample as a line of `samples.jsonl`."""
        tree = {name: value for name, value in asdict(self).items() if value or name != "scores"}
        return json.dumps(tree, ensure_ascii=False) + "\n"
