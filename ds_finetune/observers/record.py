"""The record of one optimizer step, and the interface of observers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self


@dataclass(frozen=True)
class StepRecord:
    """The metrics of one optimizer step by name (`train/loss`, ...), and facts for observers.

    `step` counts from 1. `stop` is the reason why the run ends after this step, empty if it continues. `notice` is a
    message about a skipped step, and `slow` one about a slow rank. `position` is the position in this rank's data after
    the step. `counted` holds counts such as tokens per expert. `rank_seconds` are the step times of all ranks without
    collectives, at the steps at which they were gathered.
    """

    step: int
    values: Mapping[str, float]
    is_last: bool = False
    notice: str = ""
    stop: str = ""
    best_step: int = 0
    position: tuple[int, ...] = ()
    slow: str = ""
    counted: Mapping[str, Any] = field(default_factory=dict)
    rank_seconds: tuple[float, ...] = ()

    def with_values(self, values: Mapping[str, float]) -> Self:
        """The record with more values."""
        return replace(self, values={**self.values, **values})

    def stopping(self, reason: str) -> Self:
        """The record with `reason` as its reason to end the run after this step."""
        return replace(self, stop=reason)


class Observer(Protocol):
    """The interface of observers, which are called on every rank with the record of each step. An observer that uses
    collectives must call them alike on all ranks.
    """

    def after_step(self, record: StepRecord) -> StepRecord:
        """Process the record and return it, possibly with more values or a reason to stop."""
        ...

    def close(self) -> None:
        """Called at the end of the run; does nothing by default."""
        return


class Resumable(Protocol):
    """The interface of an observer whose state is saved in checkpoints."""

    def state(self) -> dict[str, Any]:
        """The state as values that JSON can represent."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned before a resume."""
        ...


class Remembering(Observer):
    """Base class of an observer whose state is the attributes named in `saved`, which are plain values."""

    saved: ClassVar[tuple[str, ...]]

    def state(self) -> dict[str, Any]:
        """Values of the attributes named in `saved`."""
        return {name: getattr(self, name) for name in self.saved}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned before a resume."""
        vars(self).update({name: state[name] for name in self.saved})
