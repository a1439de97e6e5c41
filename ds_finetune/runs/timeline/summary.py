"""The summary of profiled steps as JSON; docs/reference/timeline.md describes it."""

import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ds_finetune.runs.timeline.breakdown import CATEGORIES, PHASES, StepTimes, Waits
from ds_finetune.runs.timeline.clock import ClockAlignment
from ds_finetune.runs.timeline.recorder import Communication
from ds_finetune.runs.timeline.spans import seconds_in

VERSION = 1
_SUMS = ("calls", "bytes", "seconds", "waiting_seconds")
Tree = dict[str, Any]
"""A JSON object."""


@dataclass(frozen=True)
class ProfiledRun:
    """What a summary says of its run: the device, the layout of ranks, and the ranks that were profiled."""

    device: str
    layout: str
    world_size: int
    ranks: tuple[int, ...]

    @property
    def knows_waiting(self) -> bool:
        """Whether all ranks were profiled, so that each collective's last rank is known."""
        return len(self.ranks) == self.world_size


def summarise_rank(rank: int, alignment: ClockAlignment, steps: Sequence[StepTimes]) -> Tree:
    """Steps of one rank and their mean."""
    rows = [_step_row(step) for step in steps]
    clock = {
        "offset_seconds": alignment.last.offset / 1e9,
        "uncertainty_seconds": alignment.uncertainty_seconds,
        "drift_seconds": alignment.drift_seconds,
    }
    return {"rank": rank, "host": socket.gethostname(), "clock": clock, "steps": rows, "mean": mean_of(rows)}


def _step_row(step: StepTimes) -> Tree:
    table = {phase: row for phase, row in step.table.items() if any(row.values())}
    categories = {category: step.of_category(category) for category in CATEGORIES}
    return {
        "step": step.step,
        "seconds": step.seconds,
        "categories": categories,
        "phases": table,
        "communication": {
            "seconds": step.communicating,
            "hidden_seconds": step.hidden,
            "exposed_seconds": categories["communication"] + categories["waiting"],
        },
    }


def mean_of(rows: Sequence[Tree]) -> Tree:
    """The mean of each number of rows of one form, where a phase that a row lacks counts as zero; no `step`."""
    phases = [phase for phase in PHASES if any(phase in row["phases"] for row in rows)]
    zeros = dict.fromkeys(CATEGORIES, 0.0)
    return {
        "seconds": fmean(row["seconds"] for row in rows),
        "categories": _mean([row["categories"] for row in rows]),
        "phases": {phase: _mean([row["phases"].get(phase, zeros) for row in rows]) for phase in phases},
        "communication": _mean([row["communication"] for row in rows]),
    }


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: fmean(row[key] for row in rows) for key in rows[0]}


def collective_rows(communications: Sequence[Communication], waits: Waits, *, steps: int) -> list[Tree]:
    """Of each kind, set of ranks and phase: calls, bytes, seconds and seconds of waiting, per step of one rank."""
    rows: dict[tuple[str, tuple[int, ...], str], Tree] = defaultdict(lambda: dict.fromkeys(_SUMS, 0.0))
    for made in communications:
        row = rows[made.kind, made.meeting.ranks, made.phase]
        waited = seconds_in([waits.span(made)])
        for name, value in zip(_SUMS, (1, made.num_bytes, seconds_in([made.span]), waited), strict=True):
            row[name] += value / steps
    return [{"kind": kind, "ranks": list(ranks), "phase": phase, **row} for (kind, ranks, phase), row in rows.items()]


def summarise(run: ProfiledRun, ranks: Sequence[Tree], collectives: Sequence[Sequence[Tree]]) -> Tree:
    """The summary of all profiled ranks."""
    return {
        "version": VERSION,
        "steps": [row["step"] for row in ranks[0]["steps"]],
        "device": run.device,
        "layout": run.layout,
        "world_size": run.world_size,
        "profiled_ranks": list(run.ranks),
        "knows_waiting": run.knows_waiting,
        "categories": list(CATEGORIES),
        "phases": list(PHASES),
        "ranks": list(ranks),
        "mean": mean_of([rank["mean"] for rank in ranks]),
        "collectives": _merge_collectives(collectives),
    }


def _merge_collectives(parts: Sequence[Sequence[Tree]]) -> list[Tree]:
    """Rows of all ranks, those of the same kind, ranks and phase averaged; the longest first."""
    rows: dict[tuple[str, tuple[int, ...], str], list[Tree]] = defaultdict(list)
    for part in parts:
        for row in part:
            rows[row["kind"], tuple(row["ranks"]), row["phase"]].append(row)
    merged = [{**found[0], **_mean([{name: row[name] for name in _SUMS} for row in found])} for found in rows.values()]
    return sorted(merged, key=lambda row: -row["seconds"])
