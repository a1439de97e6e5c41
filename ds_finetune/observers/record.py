"""The record of one optimizer step, and what an observer is."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self


@dataclass(frozen=True)
class StepRecord:
    """Numbers of one optimizer step by metric name (`train/loss`, ...); `step` counts from 1; `stop` is why the run
    ends here.

    `position` is the position in this rank's data after the step; `slow` names a straggler. `counted`
    is what features counted in the step, such as the choices of routers. `rank_seconds` are the step times of all ranks
    without collectives, where they were gathered.
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
        """Write what is still queued; nothing by default."""
        return


class Resumable(Protocol):
    """An observer with state, which checkpoints save."""

    def state(self) -> dict[str, Any]:
        """The state as plain values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        ...


class Remembering(Observer):
    """An observer whose attributes `kept` are plain values that checkpoints save."""

    kept: ClassVar[tuple[str, ...]]

    def state(self) -> dict[str, Any]:
        """The values by name."""
        return {name: getattr(self, name) for name in self.kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        vars(self).update({name: state[name] for name in self.kept})
