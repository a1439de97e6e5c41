"""Write the metrics of a run as lines of JSON: `metrics.jsonl` and `ranks.jsonl`."""

import json
import math
from functools import partial
from pathlib import Path

from ds_finetune.observers.append import append_whole
from ds_finetune.observers.outage import Outage
from ds_finetune.observers.record import StepRecord
from ds_finetune.phase_line import Say


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
