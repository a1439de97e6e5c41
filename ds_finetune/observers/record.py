"""The record of one optimizer step, and what an observer is."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, Self


@dataclass(frozen=True)
class StepRecord:
    """Numbers of one optimizer step by metric name (`train/loss`, ...); `step` counts from 1; `stop` says why the run ends here."""

    step: int
    values: Mapping[str, float]
    is_last: bool = False
    notice: str = ""
    stop: str = ""
    best_step: int = field(default=0)

    def with_values(self, values: Mapping[str, float]) -> Self:
        """The same record with more values."""
        return replace(self, values={**self.values, **values})

    def stopping(self, reason: str) -> Self:
        """The same record, asking the run to end after this step."""
        return replace(self, stop=reason)


class Observer(Protocol):
    """Called on every rank with the record of each step; collective work must be done by all ranks alike."""

    def after_step(self, record: StepRecord) -> StepRecord:
        """Look at the record and return it, perhaps with more values or a reason to stop."""
        ...

    def close(self) -> None:
        """Write what is still held back."""
        ...
