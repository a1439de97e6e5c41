"""Writes `samples.jsonl`: answers that the model generated to held-out prompts, appended after each evaluation."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ds_finetune.observers.append import append_whole
from ds_finetune.observers.outage import Outage
from ds_finetune.observers.record import StepRecord
from ds_finetune.phase_line import Say
from ds_finetune.runs.samples import Sample

MOST_SAMPLES = 8
"""Answers of each held-out set that an evaluation keeps; the first ones, so that they can be compared over time."""


class SampleFile:
    """Appends the answers of an evaluation with the step after which they were generated, a line for each."""

    def __init__(self, path: Path, say: Say) -> None:
        self._file = path.open("ab", buffering=0)
        self._lines = Outage(str(path), partial(append_whole, self._file), say)
        self._collected: Sequence[Sample] = ()

    def collect(self, samples: Sequence[Sample]) -> None:
        """Keep the answers of an evaluation until its step is recorded; the step that they have does not matter."""
        self._collected = samples

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the collected answers."""
        for sample in self._collected:
            self._lines.put(replace(sample, step=record.step).line().encode())
        self._collected = ()
        return record

    def close(self) -> None:
        """Write queued records and close the file."""
        self._lines.close()
        self._file.close()
