"""Reads run folders, even if a run is writing them, another version wrote them, or files are missing.

An unreadable file counts as missing, and `RunFolder.problems` gets a message about it.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml

from ds_finetune.config.run_file import parse_yaml, values_by_key
from ds_finetune.config.units import MIB
from ds_finetune.errors import OutputError
from ds_finetune.runs.metrics import METRICS, Curve, MetricsReader, record_of
from ds_finetune.runs.status import STATUS, RunStatus, parse_object, read_object, seen_status

CONFIG, PLAN, EXPERTS, LOG, RANK_TIMES = "config.yaml", "plan.json", "experts.jsonl", "log.txt", "ranks.jsonl"
STARTS = "starts.jsonl"
REPORT = "watchdog/report.txt"
BEST_EXPORTS = ("export-best", "adapter-best")
"""Names of the folders of a run that have the weights of its best evaluation."""
_INTEGERS = ("after_step", "steps", "ranks", "ranks_per_host", "pid")
"""Keys whose values must be integers in each line of `starts.jsonl`."""
_MOST_BYTES = 8 * MIB
_LONGEST_VALUE = 160
_MOST_DEPTH, MOST_RUNS = 4, 1_000


class RunFolder:
    """Reads the files of the run in the folder `path`. Files outside of the folder `within` are not read, even through
    a link.

    `update` reads the metrics. Each other property reads its file anew at every access.
    """

    def __init__(self, path: Path, *, within: Path | None = None) -> None:
        self.path = path
        self.within = (path if within is None else within).resolve()
        self.problems: list[str] = []
        self.metrics = MetricsReader(path / METRICS)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open the run in `path` and read its metrics. OutputError if `path` is no run folder, or if no line of its
        metrics has a step.
        """
        if not is_run(path):
            raise OutputError(
                f"the folder `{path}` holds no run: it has neither {METRICS} nor both {CONFIG} and {PLAN}",
                hint="name the output_dir of a run",
            )
        run = cls(path.absolute())
        run.update()
        return run

    def update(self) -> None:
        """Read the lines that were added to the metrics. OutputError if there are lines, but none has a step."""
        if self.file(METRICS) is not None:
            self.metrics.update()
        if self.metrics.problem and not self.metrics.curves:
            raise OutputError(
                f"the run in `{self.path}` cannot be read: {self.metrics.problem}",
                hint="repair metrics.jsonl: each line needs the key `step` with an integer",
            )

    @property
    def name(self) -> str:
        """The run's path relative to `within`, or the folder's own name; bytes that are not UTF-8 are escaped."""
        relative = os.path.relpath(self.path.absolute(), self.within)
        name = self.path.resolve().name if relative == "." else relative
        # A folder's name need not be valid UTF-8, but HTML pages and URLs must be, so other bytes are escaped.
        return name.encode(errors="backslashreplace").decode()

    def file(self, name: str) -> Path | None:
        """The path of the file `name` of the run; None unless it is a regular file in the folder `self.within`."""
        path = self.path / name
        with suppress(OSError, RuntimeError):
            if not path.is_file():
                return None
            if path.resolve().is_relative_to(self.within):
                return path
            self._note(f"{name} is a link to a file outside of {self.within}, and not read")
        return None

    def text(self, name: str) -> str | None:
        """The first 8 MiB of the file `name` as text, with replacements for invalid UTF-8; None if it cannot be
        read.
        """
        if (path := self.file(name)) is None:
            return None
        try:
            with path.open("rb") as file:
                return file.read(_MOST_BYTES).decode("utf-8", errors="replace")
        except OSError as error:
            self._note(f"{name} cannot be read: {error.strerror}")
            return None

    def tail(self, name: str, most_bytes: int = _MOST_BYTES) -> str:
        """The complete lines in the last `most_bytes` of the file `name`, as text; empty if the file cannot be read."""
        if (path := self.file(name)) is None:
            return ""
        with suppress(OSError), path.open("rb") as file:
            start = max(path.stat().st_size - most_bytes, 0)
            file.seek(start)
            text = file.read(most_bytes).decode("utf-8", errors="replace")
            return text.partition("\n")[2] if start else text
        return ""

    def recorded(self, name: str) -> dict[str, Any]:
        """The JSON object in the file `name` of the run; empty if the file is missing or has no JSON object."""
        return {} if (path := self.file(name)) is None else read_object(path)

    def records(self, name: str, most_bytes: int = _MOST_BYTES) -> list[dict[str, Any]]:
        """The JSON objects with a key `step` in the last `most_bytes` of the file `name`; other lines are skipped."""
        return [record for line in self.tail(name, most_bytes).split("\n") if (record := record_of(line)) is not None]

    @property
    def status(self) -> RunStatus:
        """The state of the run. If the status file says `running`, the run may still turn out to hang or be dead."""
        if os.path.lexists(self.path / STATUS) and self.file(STATUS) is None:
            return RunStatus("unknown", f"{STATUS} is no file of this folder")
        return seen_status(self.path)

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's configuration with all defaults, as the run wrote it to config.yaml; empty if unreadable."""
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
        """The run's configuration by dotted key, such as `optim.lr`, as one line of YAML cut at 160 characters."""
        settings = {}
        for key, value in values_by_key(self.config).items():
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip()
            text = text.removesuffix("\n...").strip()
            settings[key] = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 2]} …"
        return settings

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """The records of all starts of the run in `starts.jsonl`, oldest first. Values of a wrong type are left out."""
        starts = list[Mapping[str, Any]]()
        for line in (self.text(STARTS) or "").split("\n"):
            start = parse_object(line)
            for key in _INTEGERS:
                if type(start.get(key, 0)) is not int:
                    self._note(f"{STARTS}: {key} is {start.pop(key)!r:.40}, which is no whole number")
            starts += [start] * bool(start)
        return starts

    @property
    def last_start(self) -> Mapping[str, Any]:
        """The record of the last start of the run; empty if no start is recorded."""
        return (self.starts or [{}])[-1]

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of packages at the last start of the run, by name of the package."""
        versions = self.last_start.get("versions")
        return {str(name): str(text) for name, text in versions.items()} if isinstance(versions, dict) else {}

    @property
    def exports(self) -> Mapping[str, str]:
        """Maps the name of each exported folder of the run to `verified`, or to the reason why it is not verified."""
        results = {}
        for name in ("export", "export-best", "adapter", "adapter-best"):
            if not (self.path / name).is_dir():
                continue
            unverified = self.text(f"{name}/UNVERIFIED")
            has_record = self.file(f"{name}/verification.json") is not None
            results[name] = unverified.strip() if unverified else "verified" if has_record else "not verified"
        return results

    def export_step(self, folder: Path) -> int | None:
        """The step after which the weights in an exported folder of this run were saved; None if it is unknown.

        An export that is not verified does not record its step; the step is then taken from the metrics.
        """
        record = folder.with_name(folder.name.replace("adapter", "export")) / "verification.json"
        step = read_object(record).get("step")
        if isinstance(step, int):
            return step
        if folder.name not in BEST_EXPORTS:
            return self.metrics.last_step
        best = self.best("eval/reward", is_highest=True) or self.best("eval/loss")
        return None if best is None else best[0]

    @property
    def curves(self) -> Mapping[str, Curve]:
        """The curves of the metrics in `metrics.jsonl`, by name of the metric."""
        return self.metrics.curves

    def last(self, name: str) -> float | None:
        """The last value of the metric `name`; None if the run has no such metric."""
        curve = self.curves.get(name)
        return curve.last if curve is not None and len(curve) else None

    def best(self, name: str, *, is_highest: bool = False) -> tuple[int, float] | None:
        """Step and value of the lowest or highest finite value of the metric `name`; None if it has no finite value."""
        finite = [point for point in self.curves.get(name, Curve()).points() if np.isfinite(point[1])]
        return min(finite, key=lambda point: -point[1] if is_highest else point[1], default=None)

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run: it has metrics.jsonl, or both config.yaml and plan.json."""
    try:
        return (folder / METRICS).is_file() or ((folder / CONFIG).is_file() and (folder / PLAN).is_file())
    except OSError:
        return False


def find_runs(root: Path) -> Iterator[RunFolder]:
    """Find at most 1,000 runs in `root` and up to four levels below it, in the order of their paths.

    Symbolic links are not followed, and folders inside of a run are not searched.
    """
    root = root.resolve()
    number = 0
    for parent, names, _ in os.walk(root):
        folder = Path(parent)
        if is_run(folder):
            yield RunFolder(folder, within=root)
            number += 1
            if number == MOST_RUNS:
                return
            names.clear()
        if len(folder.relative_to(root).parts) >= _MOST_DEPTH:
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith("."))


def base_model(config: Mapping[str, Any]) -> str:
    """The path or Hub id of the model in a run file; empty if the run file has none."""
    model = config.get("model")
    path = model.get("path") if isinstance(model, dict) else model
    return path if isinstance(path, str) else ""
