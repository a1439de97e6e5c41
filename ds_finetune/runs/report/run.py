"""A run as a report reads it: the run folder with its metrics, and what the trainer recorded for reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ds_finetune.config.dotted_keys import values_by_key
from ds_finetune.errors import OutputError
from ds_finetune.runs.curves import drawn_points
from ds_finetune.runs.folder import RunFolder, is_run
from ds_finetune.runs.metrics import Curve, MetricsReader

MOST_POINTS = 1200
"""Points of a drawn curve at most."""
_LONGEST = 160
"""Characters of a value of the run file at most."""


@dataclass(frozen=True)
class ReportedRun:
    """A run folder and its metrics, all read."""

    folder: RunFolder
    metrics: MetricsReader

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
        return cls(folder, reader)

    @property
    def name(self) -> str:
        """The name of the run's folder, with escapes for bytes that are no UTF-8."""
        return self.folder.path.name.encode("utf-8", errors="backslashreplace").decode()

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved run file."""
        return self.folder.config

    @property
    def settings(self) -> dict[str, str]:
        """The values of the run file by their keys joined by dots, as YAML on one line."""
        return {key: _yaml_text(value) for key, value in values_by_key(self.config).items()}

    @cached_property
    def starts(self) -> list[Mapping[str, Any]]:
        """What each start of the run has recorded."""
        return self.folder.starts

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Versions of the packages of the last start."""
        return self.folder.versions

    @property
    def curves(self) -> Mapping[str, Curve]:
        """Metrics by name."""
        return self.metrics.curves

    @property
    def seconds(self) -> float:
        """Seconds of all steps that the metrics have."""
        curve = self.curves.get("perf/step_seconds")
        return 0.0 if curve is None else float(np.nansum(curve.values))

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The summary of the training data; empty for a run of an earlier version."""
        return self.folder.recorded("data.json")

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


def _yaml_text(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    text = text.removesuffix("\n...").strip()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2]} …"
