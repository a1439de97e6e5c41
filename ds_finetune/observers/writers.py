"""Write the metrics of a run: `metrics.jsonl`, TensorBoard, and other trackers of accelerate."""

import errno
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from ds_finetune.errors import ConfigError
from ds_finetune.observers.append import append_whole
from ds_finetune.observers.outage import Outage
from ds_finetune.observers.record import StepRecord
from ds_finetune.units import MIB

Say = Callable[[str], None]
_ROOM_BYTES = MIB
"""Minimum number of free bytes on a disk for TensorBoard's records to be written."""


class MetricsFile:
    """One JSON object per optimizer step, written at once.

    NaN and infinity are written as null with their name in `non_finite`. A line is written whole or not at all; where
    the disk is full, lines wait (`Outage`).
    """

    def __init__(self, path: Path, say: Say) -> None:
        self._file = path.open("ab", buffering=0)
        self._lines = Outage(str(path), partial(append_whole, self._file), say)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the record."""
        self._lines.put(line_of(record).encode())
        return record

    def close(self) -> None:
        """Write queued records and close the file."""
        self._lines.close()
        self._file.close()


class RankTimesFile:
    """`ranks.jsonl`: the step time of each rank without collectives, at the steps at which stragglers are looked for.

    A line is `{"step": 10, "seconds": [0.41, 0.43]}`, by rank.
    """

    def __init__(self, path: Path, say: Say) -> None:
        self._file = path.open("ab", buffering=0)
        self._lines = Outage(str(path), partial(append_whole, self._file), say)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the times, where the step has them."""
        if record.rank_seconds:
            seconds = [float(f"{each:.4g}") for each in record.rank_seconds]
            self._lines.put((json.dumps({"step": record.step, "seconds": seconds}) + "\n").encode())
        return record

    def close(self) -> None:
        """Write queued lines and close the file."""
        self._lines.close()
        self._file.close()


def line_of(record: StepRecord) -> str:
    """The line of a record."""
    finite = {name: value if math.isfinite(value) else None for name, value in record.values.items()}
    non_finite = (
        {"non_finite": [name for name, value in finite.items() if value is None]} if None in finite.values() else {}
    )
    texts = {name: text for name, text in (("notice", record.notice), ("slow", record.slow)) if text}
    return json.dumps({"step": record.step, **finite, **non_finite, **texts}) + "\n"


def check_trackers(names: Sequence[str]) -> None:
    """ConfigError for a tracker accelerate does not know (naming the known ones), or whose package is missing."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = {str(name) for name in get_available_trackers()}
    known = sorted(str(name) for name in LOGGER_TYPE_TO_CLASS)
    for name in names:
        if name not in known:
            raise ConfigError(f"log.trackers names `{name}`", hint=f"accelerate knows {', '.join(known)}")
        if name not in available:
            raise ConfigError(
                f"log.trackers names `{name}`, whose package is not installed",
                hint=f"pip install {name}, or leave it out",
            )


class Trackers:
    """Trackers that accelerate knows, by name; TensorBoard writes to the run folder.

    One that cannot write does not end the run (`Outage`).
    """

    def __init__(self, trackers: Sequence["_Tracker"], say: Say) -> None:
        self._trackers = trackers
        self._outages = [Outage(tracker.name, tracker.log, say) for tracker in trackers]

    @classmethod
    def open(cls, names: Sequence[str], output_dir: Path, settings: Mapping[str, Any], say: Say) -> Self:
        """Start each tracker of `names`, which `check_trackers` has passed."""
        trackers = [_Tracker(name, output_dir, settings) for name in names]
        for tracker in trackers:
            tracker.start()
        return cls(trackers, say)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Send the finite values."""
        values = {name: value for name, value in record.values.items() if math.isfinite(value)}
        for outage in self._outages:
            outage.put((record.step, values))
        return record

    def close(self) -> None:
        """Finish each tracker."""
        for tracker, outage in zip(self._trackers, self._outages, strict=True):
            outage.close()
            tracker.finish()


class _Tracker:
    """One tracker, which is reopened after a failed write of its event file."""

    def __init__(self, name: str, output_dir: Path, settings: Mapping[str, Any]) -> None:
        self.name, self._folder, self._settings = name, output_dir, settings
        self._open: Any = None

    def start(self) -> None:
        """Open it and store the settings of the run."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        opened = _open(LOGGER_TYPE_TO_CLASS[self.name], self._folder)
        if hasattr(opened, "start"):
            opened.start()
        opened.store_init_configuration(dict(self._settings))
        self._open = opened

    def log(self, record: tuple[int, Mapping[str, float]]) -> None:
        """Send the values of a step; OSError where they were not written."""
        step, values = record
        if self.name == "tensorboard":
            self._check_room()
        if self._open is None:
            self.start()
        try:
            self._open.log(dict(values), step=step)
        except OSError:
            # tensorboard 2.21: the writer's thread ends with its first error and leaves a torn record
            # (summary/writer/event_file_writer.py:246). Readers end the file there, so what follows needs another file.
            self._open = None if self.name == "tensorboard" else self._open
            raise

    def finish(self) -> None:
        """End it where it is open."""
        if self._open is not None:
            with suppress(OSError):
                self._open.finish()

    def _check_room(self) -> None:
        """OSError where the disk is nearly full, before a record is torn."""
        disk = os.statvfs(self._folder)
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < _ROOM_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _open(kind: Any, output_dir: Path) -> Any:  # noqa: ANN401 - accelerate's tracker classes
    if kind.requires_logging_directory:
        return kind(kind.name if kind.name == "tensorboard" else output_dir.name, logging_dir=str(output_dir))
    return kind(output_dir.name)
