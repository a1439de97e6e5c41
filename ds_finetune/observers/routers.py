"""Load balance of routed experts: metrics of each step, a warning, and the file `experts.bin`.

`counts` int64 [layers, experts] are the tokens routed to each expert. Without any token every metric is 0.

`experts.bin` begins with a line of JSON that describes the binary records after it, one per recorded step, all of the
same size and in ascending order of steps. An incomplete record of a killed run is cut off when the run resumes.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.sections import LoraConfig, RouterConfig
from ds_finetune.config.units import MIB
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import OutputError
from ds_finetune.model.routers import RouterChoices
from ds_finetune.observers.record import Observer, Remembering, StepRecord
from ds_finetune.observers.writers import Outage, append_whole

_MOST_STEPS = 50
"""Number of steps over which loads are summed for the warning, or a tenth of the run where that is less."""
_ENOUGH_TOKENS = 20
"""Mean number of tokens per expert from which an expert without tokens is not chance: with an even load its probability
is e^-20.
"""
_MANY_DEAD, _MORE_DEAD = 0.1, 0.01
"""Shares of experts without tokens that trigger the warning: in total, and above the share of the run's first steps."""
_GROWTH, _HIGH = 2.0, 2.0
"""MaxVio triggers the warning above `_HIGH` if it has grown by the factor `_GROWTH` since the run's first steps."""
Counts = NDArray[np.int64]
Layers = NDArray[np.float64]
MOST_BYTES = 64 * MIB
"""Maximum size of the records of a run: a long run of a large model records only every second step, every third, and so
on.

An extended run keeps its records, and its further steps may take as much again.
"""
_MOST_WAITING = 100
"""Maximum number of records that wait for space on a full disk."""


def max_violations(counts: Counts) -> Layers:
    """MaxVio of each layer (Wang et al., arXiv 2408.15664, eq. 4): load of the busiest expert over the mean load, less
    1; fp64 [layers].
    """
    mean = counts.mean(axis=1)
    return np.divide(counts.max(axis=1) - mean, mean, out=np.zeros_like(mean), where=mean > 0)


def effective_experts(counts: Counts) -> Layers:
    """Effective number of experts of each layer: the exponential of its load's entropy; fp64 [layers]."""
    total = counts.sum(axis=1, keepdims=True)
    share = counts / np.maximum(total, 1)
    nats = -(share * np.log(np.where(counts > 0, share, 1.0))).sum(axis=1)
    return np.where(total[:, 0] > 0, np.exp(nats), 0.0)


def num_dead_experts(counts: Counts) -> int:
    """Number of experts without a token, over all layers."""
    return int((counts[counts.any(axis=1)] == 0).sum())


def busiest_rank_ratio(counts: Counts, ep: int) -> float:
    """Load of the busiest of `ep` expert parallel ranks relative to the mean rank, averaged over layers.

    Rank i holds the i-th of equal shards of each layer's experts. All ranks wait for the busiest one in each layer, so
    the ratio is the time of experts relative to that with even loads.
    """
    of_ranks = counts.reshape(len(counts), ep, -1).sum(axis=2)
    return float((max_violations(of_ranks) + of_ranks.any(axis=1)).mean())


@dataclass
class RouterMetrics(Observer):
    """Adds the `router/*` metrics of each step; `ep` is the number of expert parallel ranks.

    Every rank knows the loads of all layers, and so tracks the biases of all layers with any number of pipeline stages.
    """

    ep: int
    bias_update: float
    """Update rate of the bias in this run; it may have changed on resume."""
    without_bias: tuple[int, ...] = ()
    """Indices, among the layers with experts, of layers whose routers have no bias."""
    _moved: NDArray[np.float64] | None = None
    """Change of each expert's bias since the run's start, fp64 [layers, experts]; None until biases are updated."""

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the metrics of a step in which routers counted tokens."""
        choices: RouterChoices | None = record.counted.get("routers")
        if choices is None:
            return record
        counts = choices.counts.numpy()
        values = self._values(counts, choices)
        if self.bias_update:
            # The update rule of `model.routers.update_biases`.
            if self._moved is None:
                self._moved = np.zeros(counts.shape)
            if not record.values["train/skipped"]:
                above = np.sign(counts * counts.shape[1] - counts.sum(axis=1, keepdims=True))
                above[list(self.without_bias)] = 0
                self._moved -= self.bias_update * above
        if self._moved is not None:
            drift = np.abs(self._moved)
            values |= {"bias_drift_mean": float(drift.mean()), "bias_drift_max": float(drift.max())}
        return record.with_values({f"router/{name}": value for name, value in values.items()})

    def state(self) -> dict[str, Any]:
        """Changes of the biases so far."""
        return {"moved": None if self._moved is None else self._moved.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the changes of the biases."""
        self._moved = None if state["moved"] is None else np.array(state["moved"], dtype=np.float64)

    def _values(self, counts: Counts, choices: RouterChoices) -> dict[str, float]:
        violations, effective = max_violations(counts), effective_experts(counts)
        values = {
            "max_violation_mean": float(violations.mean()),
            "max_violation_max": float(violations.max()),
            "dead_experts": float(num_dead_experts(counts)),
            "effective_experts_mean": float(effective.mean()),
            "effective_experts_min": float(effective.min()),
            "entropy": float(choices.entropy.mean()),
        }
        if choices.mismatch is not None:
            values["mismatch"] = choices.mismatch
        return values | ({"busiest_rank_ratio": busiest_rank_ratio(counts, self.ep)} if self.ep > 1 else {})


@dataclass
class LoadWatch(Remembering):
    """Warns in one line, once per run, when many experts get no token, or a few experts get far more than the mean.

    `steps` is the number of steps of the run; `advice` ends the line.
    """

    kept: ClassVar = ("has_warned", "first")
    steps: int
    advice: str
    say: Say
    has_warned: bool = False
    first: Sequence[float] | None = None
    """Number of experts without tokens, and MaxVio averaged over layers, in the run's first steps."""
    _counts: Counts | None = None
    _since: int = 0

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the loads of the step, and check the sum once it covers enough steps and tokens."""
        if "routers" not in record.counted or self.has_warned:
            return record
        counts = record.counted["routers"].counts.numpy()
        if self._counts is None:
            self._counts, self._since = counts.copy(), record.step
        else:
            self._counts += counts
        wanted = max(1, min(_MOST_STEPS, self.steps // 10))
        if record.step - self._since + 1 >= wanted and self._counts.mean() >= _ENOUGH_TOKENS:
            self._look(self._counts, f"steps {self._since} to {record.step}")
            self._counts = None
        return record

    def _look(self, counts: Counts, when: str) -> None:
        dead, violation = num_dead_experts(counts), float(max_violations(counts).mean())
        first = self.first or (dead, violation)
        self.first = first
        has_many = dead >= _MANY_DEAD * counts.size or dead > first[0] + _MORE_DEAD * counts.size
        is_uneven = violation > _HIGH and violation > _GROWTH * first[1]
        if not (has_many or is_uneven):
            return
        self.has_warned = True
        self.say(
            f"EXPERTS: {dead:,} of {counts.size:,} had no token in {when}, and the busiest of a layer had "
            f"{violation + 1:.1f} times the mean load (at the beginning {first[0]:,} and {first[1] + 1:.1f} times); "
            f"{self.advice}"
        )


def load_advice(lora: LoraConfig | None, router: RouterConfig | None) -> str:
    """Advice against uneven loads, for the end of the warning."""
    if lora is not None:
        return "other data, fewer steps or a lower optim.lr would change it"
    if router is not None and not router.train:
        return "routers are frozen: other data, or fewer steps, would change it"
    if router is None or not router.balance:
        return "set router.balance (0.0001) to keep loads even, or router.train to false to keep routers"
    return f"raise router.balance ({router.balance:g}), or lower optim.lr"


@dataclass(frozen=True)
class TableLayout:
    """Layout of the records of an `experts.bin` file."""

    layers: tuple[int, ...]
    """Numbers of the layers that have routed experts."""
    experts: int

    @property
    def record(self) -> np.dtype[Any]:
        """dtype of a record: step, number of tokens without padding, entropy of each router, tokens by expert."""
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
        """First line of the file."""
        fields = [[name, kind.base.str, list(kind.shape)] for name, (kind, _) in self._fields()]
        return json.dumps({"version": 1, "layers": self.layers, "record": fields}).encode() + b"\n"

    def steps_between(self, steps: int) -> int:
        """Number of steps between records, for a run of `steps` steps."""
        return -(-steps * self.record.itemsize // MOST_BYTES)

    def _fields(self) -> list[tuple[str, Any]]:
        fields = self.record.fields
        assert fields is not None
        return list(fields.items())


class ExpertTable:
    """The `experts.bin` file of a run, to which records are appended.

    A run that resumes after `after_step` continues its file; records of later steps are removed, because these steps
    are repeated.

    Raises:
        OutputError: the file belongs to another model.
    """

    def __init__(self, path: Path, layout: TableLayout, *, after_step: int) -> None:
        self.path, self._layout = path, layout
        self._file = FileIO(path, "r+" if after_step and path.exists() else "w+")
        header = layout.header
        found = self._file.read(len(header))
        if found == header:
            self._remove_after(after_step)
        elif header.startswith(found):
            # A new file, or one of a run that was killed while it wrote the header.
            self._file.truncate(0)
            with suppress(OSError):
                # On a full disk the first record writes the header, and reports an error.
                append_whole(self._file, header)
        else:
            raise OutputError(
                f"{path} begins with {found[:200]!r}, and this run's table with {header[:200]!r}",
                hint="move the file away; training starts another one",
            )

    def append(self, step: int, num_tokens: int, *, entropy: NDArray[np.float64], counts: NDArray[np.int64]) -> None:
        """Append the record of a step: `entropy` [layers] in nats, `counts` [layers, experts].

        Raises:
            OSError: the disk is full; no part of the record, or of a missing header, is left.
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

    A record that cannot be written is queued, with at most 100 others (`Outage`).
    """

    def __init__(self, table: ExpertTable, *, every: int, say: Say) -> None:
        self._table, self._every = table, every
        self._records = Outage(str(table.path), self._append, say, most=_MOST_WAITING)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Append the loads of the step if it is to be recorded."""
        if "routers" in record.counted and record.step % self._every == 0:
            self._records.put((record.step, record.counted["routers"]))
        return record

    def close(self) -> None:
        """Write queued records and close the file."""
        self._records.close()
        self._table.close()

    def _append(self, of_step: tuple[int, RouterChoices]) -> None:
        step, choices = of_step
        entropy, counts = choices.entropy.numpy(), choices.counts.numpy()
        self._table.append(step, choices.num_tokens, entropy=entropy, counts=counts)
