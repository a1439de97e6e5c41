"""The runs of a folder as the page needs them, read from disk again only where something has changed."""

import math
import threading
import time
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from ds_finetune.config.dotted_keys import values_by_key
from ds_finetune.runs.curves import drawn_points, rounded
from ds_finetune.runs.folder import RANK_TIMES, RunFolder, base_model, find_runs
from ds_finetune.runs.metrics import METRICS, MetricsReader, last_record, read_rank_times, sampled_values

MOST_COMPARED = 20
"""Runs whose curves are kept in memory and shown together at most: 16 MB for a run of 100,000 steps."""
_SEARCH_SECONDS = 2.0
_PREVIEW_POINTS, _PREVIEW_SECONDS = 48, 5.0
_SHOWN_SAMPLES, _SHOWN_NOTICES = 24, 50
LOSS = "train/loss"
Tree = dict[str, Any]


class RunStore:
    """The runs below `root`. Its methods may be called from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._runs: dict[str, RunFolder] = {}
        self._rows: dict[str, _RunRow] = {}
        self._readers: OrderedDict[str, _SharedReader] = OrderedDict()
        self._searched_at = -math.inf
        self._lock = threading.Lock()

    def rows(self) -> list[Tree]:
        """What the list of runs shows of each run, in the order of their names."""
        with self._lock:
            self._search()
            return [_row_of(name, row) for name, row in self._rows.items()]

    def find(self, name: str) -> RunFolder | None:
        """The run of that name, if there is one below the folder."""
        with self._lock:
            if name not in self._runs:
                self._search()
            return self._runs.get(name)

    def details(self, run: RunFolder) -> Tree:
        """Everything of a run but its curves."""
        run.problems.clear()
        row = _row_of(run.name, _RunRow(run))
        config = run.config
        metrics = self.reader(run)
        metrics.update()
        return {
            **row,
            "path": str(run.path),
            "config": yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True) if config else "",
            "settings": {key: str(value) for key, value in values_by_key(config).items() if value != {}},
            "plan": {name: str(text) for name, text in run.plan.items() if isinstance(text, str)},
            "versions": dict(run.versions),
            "starts": [_start(start) for start in run.starts],
            "checkpoints": [asdict(checkpoint) for checkpoint in run.checkpoints],
            "exports": dict(run.exports),
            "rollouts": [asdict(answer) for answer in run.rollouts[-_SHOWN_SAMPLES:]],
            "samples": [asdict(sample) for sample in run.samples[-_SHOWN_SAMPLES:]],
            "log": run.log_tail(),
            "watchdog": run.watchdog_report() if row["state"] in ("hung", "failed") else "",
            "notices": metrics.notices(),
            "problems": [*run.problems, *([metrics.problem] if metrics.problem else [])],
        }

    def reader(self, run: RunFolder) -> "_SharedReader":
        """The reader of a run's metrics; those that were not used for longest are dropped."""
        with self._lock:
            reader = self._readers.pop(run.name, None) or _SharedReader(run)
            self._readers[run.name] = reader
            while len(self._readers) > MOST_COMPARED:
                self._readers.popitem(last=False)
            return reader

    def rank_times(self, run: RunFolder, most: int) -> Tree:
        """Step times of ranks: of each for up to eight, else of the slowest, median and fastest."""
        path = run.file(RANK_TIMES)
        times = read_rank_times(path) if path is not None else None
        if times is None:
            return {}
        steps, seconds = times
        kept = drawn_points(seconds.max(axis=1), most)
        return {
            "steps": steps[kept].tolist(),
            "lines": {name: rounded(values[kept].tolist()) for name, values in named_times(seconds).items()},
            "last": rounded(seconds[-1].tolist()),
        }

    def _search(self) -> None:
        """Look for runs that came or went, at most every few seconds."""
        if time.monotonic() < self._searched_at + _SEARCH_SECONDS:
            return
        found = {run.name: run for run in find_runs(self.root)}
        self._runs = {name: self._runs.get(name, run) for name, run in found.items()}
        self._rows = {name: self._rows.get(name) or _RunRow(run) for name, run in self._runs.items()}
        self._searched_at = time.monotonic()


class _RunRow:
    """The row of a run in the list; its files are read again where their times or sizes have changed."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._seen: object = ()
        self._metrics: Tree = {}
        self._model = ""
        self._start: Tree = {}
        self._preview: list[float] = []
        self._previewed: object = ()
        self._preview_at = -math.inf

    def read(self) -> Tree:
        """The row now."""
        status = self._run.status
        path = self._run.file(METRICS)
        seen = _identity(path)
        if seen != self._seen:
            self._seen = seen
            self._metrics = {} if path is None else dict(last_record(path))
            self._model = base_model(self._run.config)
            self._start = _start(next(reversed(self._run.starts), {}))
        if seen != self._previewed and time.monotonic() > self._preview_at + _PREVIEW_SECONDS:
            self._preview_at, self._previewed = time.monotonic(), seen
            self._preview = [] if path is None else sampled_values(path, LOSS, _PREVIEW_POINTS)
        last = self._metrics
        step, seconds = max(status.step, int(last.get("step", 0))), _finite(last.get("perf/step_seconds"))
        is_timed = status.state == "running" and status.steps
        return {
            "name": self._run.name,
            "state": status.state,
            "reason": status.reason,
            "phase": status.phase,
            "step": step,
            "steps": status.steps or self._start.get("steps", 0),
            "ranks": max(status.ranks, self._start.get("ranks", 0)),
            "started_at": status.started_at or _finite(self._start.get("time")) or 0.0,
            "updated_at": max(status.updated_at, seen[1] / 1e9 if seen else 0.0),
            "seconds_left": (status.steps - step) * seconds if is_timed and seconds is not None else None,
            "loss": _finite(last.get(LOSS)),
            "tokens_per_second": _finite(last.get("perf/tokens_per_second")),
            "model": self._model,
            "preview": [value for value in rounded(self._preview) if value is not None],
        }


def _row_of(name: str, row: _RunRow) -> Tree:
    """The row of a run; one that cannot be read must not take the others off the list."""
    try:
        return row.read()
    except Exception as error:  # noqa: BLE001 - files of other programs and versions; the row names it
        why = f"the folder cannot be read: {type(error).__name__}"
        zeros = dict.fromkeys(("step", "steps", "ranks", "started_at", "updated_at"), 0)
        nothing = dict.fromkeys(("seconds_left", "loss", "tokens_per_second"))
        texts = {"name": name, "state": "unknown", "reason": why, "phase": "", "model": ""}
        return {**texts, **zeros, **nothing, "preview": []}


class _SharedReader:
    """A metrics reader that several requests use, one at a time; files that a link leads out of the folder are not
    read.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run, self._lock = run, threading.Lock()
        self._reader = MetricsReader(run.path / METRICS)

    @property
    def problem(self) -> str:
        """What is wrong with the file; empty where nothing is."""
        return self._reader.problem

    def notices(self) -> list[tuple[int, str]]:
        """The last notices, and which rank was slow, by step."""
        with self._lock:
            return sorted([*self._reader.notices, *self._reader.slow])[-_SHOWN_NOTICES:]

    def update(self) -> None:
        """Read what was added."""
        with self._lock:
            if not self._reader.path.exists() or self._run.file(METRICS) is not None:
                self._reader.update_all()

    def curves(self, most: int) -> Tree:
        """Each curve with at most `most` points that draw it, and the position from which `since` goes on."""
        self.update()
        with self._lock:
            found = {}
            for name, curve in self._reader.curves.items():
                steps, values = curve.steps, curve.values
                kept = drawn_points(values, most)
                found[name] = {"steps": steps[kept].tolist(), "values": rounded(values[kept].tolist())}
            return {"position": self._position(), "last_step": self._reader.last_step, "curves": found}

    def since(self, position: Tree | None) -> Tree | None:
        """Points that were added after a position; None where nothing was, and no curves where all has changed."""
        self.update()
        with self._lock:
            now = self._position()
            if position is None or now["generation"] != position["generation"]:
                return {"position": now, "curves": None}
            if now == position:
                return None
            before = position["counts"]
            added = {name: curve.since(before.get(name, 0)) for name, curve in self._reader.curves.items()}
            points = {name: {"steps": each[0], "values": rounded(each[1])} for name, each in added.items() if each[0]}
            return {"position": now, "last_step": self._reader.last_step, "curves": points}

    def _position(self) -> Tree:
        counts = {name: len(curve) for name, curve in self._reader.curves.items()}
        return {"generation": self._reader.generation, "counts": counts}


def named_times(seconds: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Step times [records] by the name of the line that shows them; `seconds` are [records, ranks]."""
    ranks = seconds.shape[1]
    if ranks <= 8:
        return {f"rank {rank}": seconds[:, rank] for rank in range(ranks)}
    return {
        "slowest rank": seconds.max(axis=1),
        "median": np.median(seconds, axis=1),
        "fastest rank": seconds.min(axis=1),
    }


def _start(start: Any) -> Tree:  # noqa: ANN401 - a mapping from a file
    known = ("time", "after_step", "steps", "command", "ranks", "host", "device")
    return {name: start[name] for name in known if isinstance(start.get(name), str | int | float)}


def _identity(path: Path | None) -> tuple[int, int, int] | None:
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)


def _finite(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None
