"""`experts.bin`: how many tokens each expert of each layer got, step by step.

The file begins with a line of JSON that describes the records behind it. All have the same size, in steps of ascending
number, and are appended whole. What a killed run left of a record is no record, and is cut off when the run resumes.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.units import MIB
from ds_finetune.console.phase_line import Say
from ds_finetune.engine.router_balance import RouterChoices
from ds_finetune.errors import OutputError
from ds_finetune.observers.line_file import append_whole
from ds_finetune.observers.outage import Outage
from ds_finetune.observers.record import StepRecord

MOST_BYTES = 64 * MIB
"""The steps of a run take no more: a long run of a large model writes every second step, or every third, and so on.

An extended run keeps its records, and its further steps take less than that once more.
"""

_MOST_WAITING = 100
"""Records that wait for room on a full disk."""


@dataclass(frozen=True)
class TableLayout:
    """What the records of a table hold."""

    layers: tuple[int, ...]
    """Numbers of the layers that have routed experts."""
    experts: int

    @property
    def record(self) -> np.dtype[Any]:
        """A record: the step, its tokens without padding, the entropy of each layer's router and the tokens of each
        expert.
        """
        layers = len(self.layers)
        return np.dtype(
            [
                ("step", "<i8"),
                ("num_tokens", "<i8"),
                ("entropy", "<f4", (layers,)),
                ("counts", "<i4", (layers, self.experts)),
            ]
        )

    @property
    def header(self) -> bytes:
        """The first line of the file."""
        fields = [[name, kind.base.str, list(kind.shape)] for name, (kind, _) in self._fields()]
        return json.dumps({"version": 1, "layers": self.layers, "record": fields}).encode() + b"\n"

    def steps_between(self, steps: int) -> int:
        """Every how many steps a run of `steps` steps appends a record."""
        return -(-steps * self.record.itemsize // MOST_BYTES)

    def _fields(self) -> list[tuple[str, Any]]:
        fields = self.record.fields
        assert fields is not None
        return list(fields.items())


class ExpertTable:
    """The table of a run, to which records are appended.

    A run that resumes after `after_step` continues its table; records of later steps are removed, since these steps are
    done again.

    Raises:
        OutputError: it is the table of another model.
    """

    def __init__(self, path: Path, layout: TableLayout, *, after_step: int) -> None:
        self.path, self._layout = path, layout
        self._file = FileIO(path, "r+" if after_step and path.exists() else "w+")
        header = layout.header
        found = self._file.read(len(header))
        if found == header:
            self._remove_after(after_step)
        elif header.startswith(found):
            # New, or of a run that was killed while it wrote this line.
            self._file.truncate(0)
            with suppress(OSError):
                # On a full disk the first record tries again, and says so.
                append_whole(self._file, header)
        else:
            raise OutputError(
                f"{path} begins with {found[:200]!r}, and this run's table with {header[:200]!r}",
                hint="move the file away; training starts another one",
            )

    def append(self, step: int, num_tokens: int, *, entropy: NDArray[np.float64], counts: NDArray[np.int64]) -> None:
        """Write the record of a step: `entropy` [layers] in nats, `counts` [layers, experts].

        Raises:
            OSError: the disk is full; nothing of the record is left, nor of a first line that was missing.
        """
        record = np.zeros((), dtype=self._layout.record)
        record["step"], record["num_tokens"], record["entropy"], record["counts"] = step, num_tokens, entropy, counts
        is_empty = os.fstat(self._file.fileno()).st_size == 0
        append_whole(self._file, (self._layout.header if is_empty else b"") + record.tobytes())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _remove_after(self, step: int) -> None:
        size, start = self._layout.record.itemsize, len(self._layout.header)
        self._file.seek(start)
        whole = (os.fstat(self._file.fileno()).st_size - start) // size
        steps = [self._step_of(number) for number in range(whole)]
        self._file.truncate(start + size * sum(found <= step for found in steps))

    def _step_of(self, number: int) -> int:
        at = len(self._layout.header) + number * self._layout.record.itemsize
        return int.from_bytes(os.pread(self._file.fileno(), 8, at), "little", signed=True)


class ExpertTableWriter:
    """Appends the loads of every `every`-th step to `table`.

    A record that cannot be written waits for room, with at most 100 others (`Outage`).
    """

    def __init__(self, table: ExpertTable, *, every: int, say: Say) -> None:
        self._table, self._every = table, every
        self._records = Outage(str(table.path), self._append, say, most=_MOST_WAITING)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Append the loads of the step where it is its turn."""
        if record.router_choices is not None and record.step % self._every == 0:
            self._records.put((record.step, record.router_choices))
        return record

    def close(self) -> None:
        """Write queued records and close the file."""
        self._records.close()
        self._table.close()

    def _append(self, of_step: tuple[int, RouterChoices]) -> None:
        step, choices = of_step
        entropy, counts = choices.entropy.numpy(), choices.counts.numpy()
        self._table.append(step, choices.num_tokens, entropy=entropy, counts=counts)
