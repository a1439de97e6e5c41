"""`samples.jsonl`: answers that the model generated to held-out prompts, appended after each evaluation."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ds_finetune.observers.append import append_whole
from ds_finetune.observers.outage import Outage
from ds_finetune.observers.record import StepRecord

MOST_SAMPLES = 8
"""Answers of each held-out set that an evaluation keeps; the first ones, so that they can be compared over time."""


@dataclass(frozen=True)
class AnsweredPrompt:
    """A held-out prompt, the greedy answer to it, and the answer of the data; all as text.

    `name` is that of the set: the first part of its metric names, `eval` or `eval/NAME`.
    """

    name: str
    prompt: str
    answer: str
    expected: str


class SampleFile:
    """Appends the answers of an evaluation with the step after which they were generated, one JSON object a line."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._file = path.open("ab", buffering=0)
        self._lines = Outage(str(path), partial(append_whole, self._file), say)
        self._collected: Sequence[AnsweredPrompt] = ()

    def collect(self, samples: Sequence[AnsweredPrompt]) -> None:
        """Keep the answers of an evaluation until its step is recorded."""
        self._collected = samples

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the collected answers."""
        for sample in self._collected:
            self._lines.put((json.dumps({"step": record.step, **asdict(sample)}) + "\n").encode())
        self._collected = ()
        return record

    def close(self) -> None:
        """Write queued records and close the file."""
        self._lines.close()
        self._file.close()
