"""A run as a report reads it: run folder, metrics, and records of the trainer for reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from ds_finetune.config.dotted_keys import values_by_key
from ds_finetune.errors import OutputError
from ds_finetune.runs.folder import CONFIG, PLAN, RANK_TIMES, RunFolder, is_run
from ds_finetune.runs.metrics import METRICS, Curve, MetricsReader, read_rank_times

_LONGEST = 160
"""Maximum characters shown of a value of the run file."""


@dataclass(frozen=True)
class ReportedRun:
    """A run folder with its metrics, read completely."""

    folder: RunFolder
    metrics: MetricsReader

    @classmethod
    def read(cls, path: Path) -> "ReportedRun":
        """Read a run, which may be one that another process is writing.

        Raises:
            OutputError: `path` is no run folder, or no line of its metrics has a step.
        """
        if not is_run(path):
            raise OutputError(
                f"`{path}` holds no run: neither {METRICS} nor {CONFIG} with {PLAN}",
                hint="name the output_dir of a run",
            )
        return cls.of(RunFolder(path.absolute()), MetricsReader(path / METRICS))

    @classmethod
    def of(cls, folder: RunFolder, metrics: MetricsReader) -> "ReportedRun":
        """The run in `folder`, after reading new metrics; OutputError if no metrics line has a step."""
        if folder.file(METRICS) is not None:
            metrics.update()
        if metrics.problem and not metrics.curves:
            raise OutputError(
                f"`{folder.path}` is no run of this version: {metrics.problem}",
                hint="each line of metrics.jsonl needs the key `step` with a whole number",
            )
        return cls(folder, metrics)

    @property
    def name(self) -> str:
        """The run's path below the watched folder, or its name; bytes that are not UTF-8 are escaped."""
        return self.folder.name.encode("utf-8", errors="backslashreplace").decode()

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved run file."""
        return self.folder.config

    @property
    def settings(self) -> dict[str, str]:
        """Values of the run file by dotted key, as YAML on one line."""
        return {key: _yaml_text(value) for key, value in values_by_key(self.config).items()}

    @cached_property
    def starts(self) -> list[Mapping[str, Any]]:
        """Records of all starts of the run."""
        return self.folder.starts

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Package versions of the last start."""
        return self.folder.versions

    @property
    def curves(self) -> Mapping[str, Curve]:
        """Curves by name of the metric."""
        return self.metrics.curves

    @property
    def seconds(self) -> float:
        """Total seconds of all steps in the metrics."""
        curve = self.curves.get("perf/step_seconds")
        return 0.0 if curve is None else float(np.nansum(curve.values))

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """The summary of the training data; empty for a run of an earlier version."""
        return self.folder.recorded("data.json")

    @cached_property
    def rank_times(self) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Steps [n] and seconds without collectives [n, ranks]; None if not recorded."""
        path = self.folder.file(RANK_TIMES)
        return None if path is None else read_rank_times(path)

    def last(self, name: str) -> float | None:
        """The last value of a metric; None without the metric."""
        curve = self.curves.get(name)
        return curve.last if curve is not None and len(curve) else None

    def best(self, name: str) -> tuple[int, float] | None:
        """Step and value of the lowest finite value of a metric; None without one."""
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
