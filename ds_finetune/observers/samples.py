"""Writes `samples.jsonl`: answers that the model generated to held-out prompts, appended after each evaluation."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ds_finetune.console.phase_line import Say
from ds_finetune.observers.line_file import LineFile
from ds_finetune.observers.record import StepRecord
from ds_finetune.runs.metrics import Sample

MOST_SAMPLES = 8
"""Answers of each held-out set that an evaluation keeps; the first ones, so that they can be compared over time."""


class SampleFile(LineFile):
    """Appends the answers of an evaluation with the step after which they were generated, a line for each."""

    def __init__(self, path: Path, say: Say) -> None:
        super().__init__(path, say)
        self._collected: Sequence[Sample] = ()

    def collect(self, samples: Sequence[Sample]) -> None:
        """Keep the answers of an evaluation until its step is recorded; the step that they have does not matter."""
        self._collected = samples

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the collected answers."""
        for sample in self._collected:
            self.put(replace(sample, step=record.step).line())
        self._collected = ()
        return record
