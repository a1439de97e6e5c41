"""Reads `samples.jsonl`: answers that a run generated at its evaluations (written by observers/samples.py)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_finetune.config.units import MIB

SAMPLES = "samples.jsonl"
_MOST_BYTES = 8 * MIB


@dataclass(frozen=True)
class Sample:
    """The answer that the model gave at a step to a prompt of the held-out set `name`, and the expected one."""

    step: int
    name: str
    prompt: str
    answer: str
    expected: str

    def line(self) -> str:
        """The line of the file."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file, oldest first, of its last 8 MiB; lines that are none are passed over."""
    try:
        with path.open("rb") as file:
            start = max(path.stat().st_size - _MOST_BYTES, 0)
            file.seek(start)
            lines = file.read(_MOST_BYTES).splitlines()[bool(start) :]
    except OSError:
        return []
    return [sample for line in lines if (sample := _sample_of(line)) is not None]


def _sample_of(line: bytes) -> Sample | None:
    try:
        sample = Sample(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (sample.name, sample.prompt, sample.answer, sample.expected)
    return sample if isinstance(sample.step, int) and all(isinstance(text, str) for text in texts) else None
