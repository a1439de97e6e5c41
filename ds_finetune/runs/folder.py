"""Reads run folders, which another process may be writing, another version may have written, or which are half removed.

Unreadable files count as absent, and `RunFolder.problems` names them.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml
from numpy.typing import NDArray

from ds_finetune.checkpoint.commit import MANIFEST, Manifest, complete_steps, step_name
from ds_finetune.config.dotted_keys import values_by_key
from ds_finetune.config.run_file import parse_yaml
from ds_finetune.errors import CheckpointError, OutputError
from ds_finetune.runs.metrics import (
    METRICS,
    ROLLOUTS,
    SAMPLES,
    Curve,
    MetricsReader,
    Sample,
    read_expert_table,
    read_rank_times,
    read_rollouts,
    read_samples,
    read_tail,
)
from ds_finetune.runs.status import STATUS, LastChange, RunStatus, parse_object, read_object, seen_status
from ds_finetune.system.disk import bytes_below

CONFIG, PLAN, EXPERTS, LOG, RANK_TIMES = "config.yaml", "plan.json", "experts.jsonl", "log.txt", "ranks.jsonl"
STARTS = "starts.jsonl"
REPORT = "watchdog/report.txt"
_WHOLE_NUMBERS = ("after_step", "steps", "ranks", "ranks_per_host", "pid")
"""Integer fields recorded by each start of a run; another version may store another type."""
_MOST_BYTES = 2**22
_LONGEST_VALUE = 160
"""Maximum characters shown of a value of the run file."""
_MOST_DEPTH, MOST_RUNS = 4, 1_000


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint of a run: step, bytes, and `eval/loss` if known."""

    step: int
    num_bytes: int
    eval_loss: float | None


class RunFolder:
    """The run in `path`; files outside `within` are not read, even if a symbolic link leads there.

    Properties read their files at each access, except those of metrics, which `update` reads.
    """

    def __init__(self, path: Path, *, within: Path | None = None) -> None:
        self.path = path
        self.within = (path if within is None else within).resolve()
        self.problems: list[str] = []
        self.metrics = MetricsReader(path / METRICS)
        self._status_change = LastChange()

    @classmethod
    def read(cls, path: Path) -> Self:
        """The run in `path` with its metrics; another process may be writing it.

        Raises:
            OutputError: `path` is no run folder, or no line of its metrics has a step.
        """
        if not is_run(path):
            raise OutputError(
                f"`{path}` holds no run: neither {METRICS} nor {CONFIG} with {PLAN}",
                hint="name the output_dir of a run",
            )
        run = cls(path.absolute())
        run.update()
        return run

    def update(self) -> None:
        """Read new metrics; OutputError if no line of them has a step."""
        if self.file(METRICS) is not None:
            self.metrics.update()
        if self.metrics.problem and not self.metrics.curves:
            raise OutputError(
                f"`{self.path}` is no run of this version: {self.metrics.problem}",
                hint="each line of metrics.jsonl needs the key `step` with a whole number",
            )

    @property
    def name(self) -> str:
        """The run's path relative to `within`, or the folder's own name; bytes that are not UTF-8 are escaped."""
        relative = os.path.relpath(self.path.absolute(), self.within)
        name = self.path.resolve().name if relative == "." else relative
        # Folder names need not be UTF-8, but pages and addresses are.
        return name.encode(errors="backslashreplace").decode()

    def file(self, name: str) -> Path | None:
        """A regular file of the run that may be read; None if there is none."""
        path = self.path / name
        with suppress(OSError, RuntimeError):
            if not path.is_file():
                return None
            if path.resolve().is_relative_to(self.within):
                return path
            self._note(f"{name} is a link to a file outside of {self.within}, and not read")
        return None

    @property
    def status(self) -> RunStatus:
        """The run's state, or how it ended."""
        if os.path.lexists(self.path / STATUS) and self.file(STATUS) is None:
            return RunStatus("unknown", f"{STATUS} is no file of this folder")
        return seen_status(self.path, change=self._status_change)

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved run file as written, possibly by another version; empty if it cannot be read."""
        text = self.text(CONFIG)
        if text is None:
            return {}
        try:
            tree = parse_yaml(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError as error:
            self._note(f"{CONFIG} is no YAML: {str(error).splitlines()[0]}")
            return {}
        return tree if isinstance(tree, dict) else {}

    @property
    def settings(self) -> dict[str, str]:
        """Values of the run file by dotted key, as YAML on one line."""
        return {key: _yaml_text(value) for key, value in values_by_key(self.config).items()}

    def recorded(self, name: str) -> dict[str, Any]:
        """The JSON object in a file of the run; empty for a missing or unreadable file."""
        return {} if (path := self.file(name)) is None else read_object(path)

    @property
    def plan(self) -> Mapping[str, Any]:
        """Names and texts in `plan.json`."""
        return self.recorded(PLAN)

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """Records of all starts of the run (trainer/run_records.py), oldest first.

        Fields of an unknown type are left out.
        """
        lines = (self.text(STARTS) or "").splitlines()
        return [self._known_fields(start) for line in lines if (start := parse_object(line))]

    def _known_fields(self, start: Mapping[str, Any]) -> Mapping[str, Any]:
        unknown = {key: start[key] for key in _WHOLE_NUMBERS if key in start and type(start[key]) is not int}
        for key, value in unknown.items():
            self._note(f"{STARTS}: {key} is {value!r:.40}, which is no whole number")
        return {key: value for key, value in start.items() if key not in unknown}

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of packages at the last start of the run."""
        starts = self.starts
        versions = starts[-1].get("versions") if starts else None
        return {str(name): str(text) for name, text in versions.items()} if isinstance(versions, dict) else {}

    @property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """Complete checkpoints, oldest first."""
        folder = self.path / "checkpoints"
        if not folder.resolve().is_relative_to(self.within):
            self._note(f"checkpoints is a link to a folder outside of {self.within}, and not read")
            return []
        try:
            return [self._checkpoint(folder / step_name(step), step) for step in complete_steps(folder)]
        except OSError:
            return []

    def _checkpoint(self, folder: Path, step: int) -> SavedCheckpoint:
        loss = None
        if self.file(os.path.relpath(folder / MANIFEST, self.path)) is not None:
            with suppress(CheckpointError, TypeError):
                loss = Manifest.read(folder).eval_loss
        return SavedCheckpoint(step, bytes_below(folder), loss)

    @property
    def exports(self) -> Mapping[str, str]:
        """For each exported folder of the run, `verified` or the reason why it is not verified."""
        results = {}
        for name in ("export", "export-best", "adapter", "adapter-best"):
            if not (self.path / name).is_dir():
                continue
            unverified = self.text(f"{name}/UNVERIFIED")
            has_record = self.file(f"{name}/verification.json") is not None
            results[name] = unverified.strip() if unverified else "verified" if has_record else "not verified"
        return results

    @property
    def samples(self) -> list[Sample]:
        """Answers generated to held-out prompts, oldest first."""
        return [] if (path := self.file(SAMPLES)) is None else read_samples(path)

    @property
    def rollouts(self) -> list[Sample]:
        """Answers sampled to training prompts, oldest first."""
        return [] if (path := self.file(ROLLOUTS)) is None else read_rollouts(path)

    @property
    def experts(self) -> tuple[list[int], dict[str, NDArray[Any]]] | None:
        """Indices of the layers with routed experts, and their loads (`read_expert_table`); None without records."""
        if (path := self.file(EXPERTS)) is None:
            return None
        try:
            table = read_expert_table(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._note(f"{EXPERTS} cannot be read: {error}")
            return None
        return table if table[0] else None

    @property
    def data(self) -> Mapping[str, Any]:
        """The summary of the training data; empty where the run has none."""
        return self.recorded("data.json")

    @property
    def rank_times(self) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Steps [n] and seconds without collectives [n, ranks]; None if not recorded."""
        path = self.file(RANK_TIMES)
        return None if path is None else read_rank_times(path)

    @property
    def curves(self) -> Mapping[str, Curve]:
        """Curves by name of the metric."""
        return self.metrics.curves

    @property
    def seconds(self) -> float:
        """Total seconds of all steps in the metrics."""
        curve = self.curves.get("perf/step_seconds")
        return 0.0 if curve is None else float(np.nansum(curve.values))

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

    def log_tail(self, most_bytes: int = 16_384) -> str:
        """The last complete lines of `log.txt`; bytes that are not UTF-8 are replaced."""
        path = self.file(LOG)
        return "" if path is None else read_tail(path, most_bytes).decode("utf-8", errors="replace")

    def watchdog_report(self) -> str:
        """The watchdog's report of the last failure; empty without one."""
        return self.text(REPORT) or ""

    def text(self, name: str, most_bytes: int = _MOST_BYTES) -> str | None:
        """The first `most_bytes` of a file, with bytes that are not UTF-8 replaced; None if it cannot be read."""
        if (path := self.file(name)) is None:
            return None
        try:
            with path.open("rb") as file:
                return file.read(most_bytes).decode("utf-8", errors="replace")
        except OSError as error:
            self._note(f"{name} cannot be read: {error.strerror}")
            return None

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def is_run(folder: Path) -> bool:
    """Whether a folder looks like a run folder: it has metrics, or a resolved configuration and a plan."""
    try:
        return (folder / METRICS).is_file() or ((folder / CONFIG).is_file() and (folder / PLAN).is_file())
    except OSError:
        return False


def find_runs(root: Path) -> Iterator[RunFolder]:
    """The runs in `root` and up to four levels below it, in the order of their paths, at most 1,000.

    Symbolic links are not followed, and run folders are not searched.
    """
    root = root.resolve()
    number = 0
    for parent, names, _ in os.walk(root):
        folder = Path(parent)
        depth = len(folder.relative_to(root).parts)
        if is_run(folder):
            yield RunFolder(folder, within=root)
            number += 1
            if number == MOST_RUNS:
                return
            names.clear()
        if depth >= _MOST_DEPTH:
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith("."))


def base_model(config: Mapping[str, Any]) -> str:
    """The path or id of the model in a run file; empty if there is none."""
    model = config.get("model")
    path = model.get("path") if isinstance(model, dict) else model
    return path if isinstance(path, str) else ""


def _yaml_text(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    text = text.removesuffix("\n...").strip()
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 2]} …"
