"""A run as a report reads it: the run folder with its metrics, and what the trainer recorded for reports."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ds_finetune.errors import OutputError
from ds_finetune.runs.curves import drawn_points
from ds_finetune.runs.folder import RunFolder, is_run
from ds_finetune.runs.metrics import Curve, MetricsReader
from ds_finetune.runs.status import read_object

MOST_POINTS = 1200
"""Points of a drawn curve at most."""
_MOST_BYTES = 4 * 2**20
"""Bytes of a list of starts that are read at most."""
_WHOLE_NUMBERS = ("after_step", "steps", "ranks", "ranks_per_host", "pid")
"""What a start records as whole numbers; another version may have another form of it."""


@dataclass(frozen=True)
class ReportedRun:
    """A run folder and its metrics, all read."""

    folder: RunFolder
    metrics: MetricsReader
    starts: list[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "ReportedRun":
        """Read a run, which may be one that another process is writing; OutputError where `path` is no run folder."""
        if not is_run(path):
            raise OutputError(
                f"`{path}` holds no run: neither metrics.jsonl nor config.yaml with plan.json",
                hint="name the output_dir of a run",
            )
        folder = RunFolder(path.absolute())
        reader = MetricsReader(path / "metrics.jsonl")
        reader.update_all()
        return cls(folder, reader, _read_starts(folder))

    @property
    def name(self) -> str:
        """The name of the run's folder, with escapes for bytes that are no UTF-8."""
        return self.folder.path.name.encode("utf-8", errors="backslashreplace").decode()

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved run file."""
        return self.folder.config

    @property
    def curves(self) -> Mapping[str, Curve]:
        """Metrics by name."""
        return self.metrics.curves

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The summary of the training data; empty for a run of an earlier version."""
        return self.recorded("data.json")

    @cached_property
    def exports(self) -> list[Mapping[str, Any]]:
        """The results of verifying exports."""
        found = self.recorded("exports.json").get("exports", [])
        return [result for result in found if isinstance(result, dict) and "folder" in result]

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the packages of the last start."""
        recorded = self.starts[-1].get("versions") if self.starts else None
        return recorded if isinstance(recorded, dict) else self.folder.versions

    def drawn(self, name: str, most: int = MOST_POINTS) -> tuple[Any, Any]:
        """Steps and values [at most `most`] of a metric, thinned without losing a spike."""
        curve = self.curves[name]
        steps, values = curve.steps, curve.values
        kept = drawn_points(values, most)
        return steps[kept], values[kept]

    def last(self, name: str) -> float | None:
        """The last value of a metric; None where there is none."""
        curve = self.curves.get(name)
        return curve.last if curve is not None and len(curve) else None

    def best(self, name: str) -> tuple[int, float] | None:
        """Step and value of the lowest finite value of a metric; None where there is none."""
        curve = self.curves.get(name)
        if curve is None:
            return None
        values = np.where(np.isfinite(curve.values), curve.values, np.inf)
        at = int(values.argmin())
        return (int(curve.steps[at]), float(values[at])) if np.isfinite(values[at]) else None

    def recorded(self, name: str) -> dict[str, Any]:
        """The JSON object in a file of the run; empty where there is none that can be read."""
        path = self.folder.file(name)
        return {} if path is None else read_object(path)


def _read_starts(folder: RunFolder) -> list[Mapping[str, Any]]:
    path = folder.file("starts.jsonl")
    if path is None:
        return []
    with path.open("rb") as file:
        lines = file.read(_MOST_BYTES).splitlines()
    return [_known_fields(start, folder) for line in lines if (start := _object_of(line))]


def _known_fields(start: Mapping[str, Any], folder: RunFolder) -> Mapping[str, Any]:
    """The start without fields of another form; `RunFolder.problems` names them."""
    unknown = {key: start[key] for key in _WHOLE_NUMBERS if key in start and type(start[key]) is not int}
    for key, value in unknown.items():
        folder.problems.append(f"starts.jsonl: {key} is {value!r:.40}, which is no whole number")
    return {key: value for key, value in start.items() if key not in unknown}


def _object_of(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; empty where it is none, as the end of a file that is being written."""
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}
