"""The record of one optimizer step, and the interface of observers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one optimizer step by name (`train/loss`, ...). `step` counts from 1; `stop` is the reason why the run
    ends here, if it does.

    `position` is the position in this rank's data after the step; `slow` names a straggler. `counted` holds counts of
    features in the step, such as tokens per expert. `rank_seconds` are the step times of all ranks without collectives,
    where they were gathered.
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
        """The record, asking the run to end after this step for `reason`."""
        return replace(self, stop=reason)


class Observer(Protocol):
    """Called on every rank with the record of each step. Collectives must be called alike on all ranks."""

    def after_step(self, record: StepRecord) -> StepRecord:
        """Process the record and return it, possibly with more values or a reason to stop."""
        ...

    def close(self) -> None:
        """Write everything that is queued; nothing by default."""
        return


class Resumable(Protocol):
    """An observer whose state checkpoints save."""

    def state(self) -> dict[str, Any]:
        """The state as plain values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        ...


class Remembering(Observer):
    """An observer whose attributes named in `saved` are plain values that checkpoints save."""

    saved: ClassVar[tuple[str, ...]]

    def state(self) -> dict[str, Any]:
        """Values of the attributes named in `saved`."""
        return {name: getattr(self, name) for name in self.saved}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        vars(self).update({name: state[name] for name in self.saved})
