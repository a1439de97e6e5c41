"""Write the metrics of a run as lines of JSON: `metrics.jsonl` and `ranks.jsonl`."""

import json
import math

from ds_finetune.observers.line_file import LineFile
from ds_finetune.observers.record import StepRecord


class MetricsFile(LineFile):
    """One JSON object per optimizer step; NaN and infinity are written as null with their name in `non_finite`."""

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the record."""
        self.put(line_of(record))
        return record


class RankTimesFile(LineFile):
    """`ranks.jsonl`: the step time of each rank without collectives, at the steps at which stragglers are looked for.

    A line is `{"step": 10, "seconds": [0.41, 0.43]}`, by rank.
    """

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the times, where the step has them."""
        if record.rank_seconds:
            seconds = [float(f"{each:.4g}") for each in record.rank_seconds]
            self.put(json.dumps({"step": record.step, "seconds": seconds}) + "\n")
        return record


def line_of(record: StepRecord) -> str:
    """The line of a record."""
    finite = {name: value if math.isfinite(value) else None for name, value in record.values.items()}
    non_finite = (
        {"non_finite": [name for name, value in finite.items() if value is None]} if None in finite.values() else {}
    )
    texts = {name: text for name, text in (("notice", record.notice), ("slow", record.slow)) if text}
    return json.dumps({"step": record.step, **finite, **non_finite, **texts}) + "\n"
