"""The record of one optimizer step, and the interface of observers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self


@dataclass(frozen=True)
class StepRecord:
    """The metrics of one optimizer step by name (`train/loss`, ...), and facts about the step for observers.

    `step` counts from 1. `stop` is the reason why the run ends after this step, empty if it continues. `notice` is a
    message about a skipped step, and `slow` one about a slow rank. `position` is the position in this rank's data after
    the step. `counted` has counts such as tokens per expert. `rank_seconds` has each rank's step time, without the time
    in collectives, if the times were gathered at this step.
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
        """Copy the record with the metrics `values` added."""
        return replace(self, values={**self.values, **values})

    def stopping(self, reason: str) -> Self:
        """Copy the record with `reason` as the reason why the run ends after this step."""
        return replace(self, stop=reason)


class Observer(Protocol):
    """Interface of observers, which are called on every rank with the record of each step. An observer that uses
    collectives must call them alike on all ranks.
    """

    def after_step(self, record: StepRecord) -> StepRecord:
        """Process the record of a step and return it, possibly with further metrics or with a reason to end the run."""
        ...

    def close(self) -> None:
        """Release the observer's resources at the end of the run; by default, do nothing."""
        return


class Resumable(Protocol):
    """Interface of an observer whose state is saved in checkpoints."""

    def state(self) -> dict[str, Any]:
        """The state of the observer as values that JSON can represent."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the observer's state, which `state` returned before the run was interrupted."""
        ...


class Remembering(Observer):
    """Base class of an observer. Checkpoints save the attributes that `saved` names, which have plain values."""

    saved: ClassVar[tuple[str, ...]]

    def state(self) -> dict[str, Any]:
        """Values of the attributes that `saved` names."""
        return {name: getattr(self, name) for name in self.saved}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the attributes that `saved` names from a checkpoint's `state`."""
        vars(self).update({name: state[name] for name in self.saved})
