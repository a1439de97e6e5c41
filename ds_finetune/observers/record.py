"""The record of one optimizer step, and what an observer is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self


@dataclass(frozen=True)
class StepRecord:
    """Numbers of one optimizer step by metric name (`train/loss`, ...); `step` counts from 1; `stop` says why the run
    ends here.

    `position` is where this rank's data stands after the step; `slow` names a rank that holds the others up.
    """

    step: int
    values: Mapping[str, float]
    is_last: bool = False
    notice: str = ""
    stop: str = ""
    best_step: int = 0
    position: tuple[int, ...] = ()
    slow: str = ""

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


class Resumable(Protocol):
    """An observer that remembers something from step to step, which a checkpoint keeps."""

    def state(self) -> dict[str, Any]:
        """What it remembers, as plain values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Remember what `state` gave."""
        ...
