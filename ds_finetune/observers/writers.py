"""The numbers of a run as files and trackers: `metrics.jsonl`, TensorBoard, and what accelerate knows by name."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ds_finetune.errors import ConfigError
from ds_finetune.observers.record import StepRecord


class MetricsFile:
    """One JSON object per optimizer step, flushed at once; NaN and infinity are written as null with their name in `non_finite`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the record."""
        self._file.write(line_of(record))
        self._file.flush()
        return record

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def line_of(record: StepRecord) -> str:
    """The line of a record."""
    finite = {name: value if math.isfinite(value) else None for name, value in record.values.items()}
    odd = {"non_finite": [name for name, value in finite.items() if value is None]} if None in finite.values() else {}
    notice = {"notice": record.notice} if record.notice else {}
    return json.dumps({"step": record.step, **finite, **odd, **notice}) + "\n"


def check_trackers(names: Sequence[str]) -> None:
    """ConfigError for a tracker accelerate does not know (naming the known ones), or whose package is missing."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = {str(name) for name in get_available_trackers()}
    known = sorted(str(name) for name in LOGGER_TYPE_TO_CLASS)
    for name in names:
        if name not in known:
            raise ConfigError(f"log.trackers names `{name}`", hint=f"accelerate knows {', '.join(known)}")
        if name not in available:
            raise ConfigError(f"log.trackers names `{name}`, whose package is not installed", hint=f"pip install {name}, or leave it out")


class Trackers:
    """Trackers that accelerate knows, by name; TensorBoard lies in the run folder."""

    def __init__(self, trackers: Sequence[Any]) -> None:
        self._trackers = list(trackers)

    @classmethod
    def open(cls, names: Sequence[str], output_dir: Path, settings: Mapping[str, Any]) -> Self:
        """Start each tracker of `names`, which `check_trackers` has passed."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        opened = [_open(LOGGER_TYPE_TO_CLASS[name], output_dir) for name in names]
        for tracker in opened:
            if hasattr(tracker, "start"):
                tracker.start()
            tracker.store_init_configuration(dict(settings))
        return cls(opened)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Send the finite values."""
        values = {name: value for name, value in record.values.items() if math.isfinite(value)}
        for tracker in self._trackers:
            tracker.log(values, step=record.step)
        return record

    def close(self) -> None:
        """Finish each tracker."""
        for tracker in self._trackers:
            tracker.finish()


def _open(kind: Any, output_dir: Path) -> Any:  # noqa: ANN401 - accelerate's tracker classes
    if kind.requires_logging_directory:
        return kind(kind.name if kind.name == "tensorboard" else output_dir.name, logging_dir=str(output_dir))
    return kind(output_dir.name)
