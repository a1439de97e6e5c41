"""Observers from users or other packages: they see the record of each optimizer step and may end the run."""

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from ds_finetune.errors import ConfigError, FinetuneError, RunError
from ds_finetune.observers.record import Observer, StepRecord

ENTRY_POINTS = "ds_finetune.observers"
"""Group of Python entry points by which packages offer observers for the key `log.observers`. An entry point refers to
a callable without arguments that returns an observer.
"""


def load_observers(names: Sequence[str]) -> list[Observer]:
    """Make the observers that installed packages offer under `names`; ConfigError for one that cannot be made."""
    offered = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    for name in names:
        if name not in offered:
            installed = ", ".join(sorted(offered)) or "none"
            raise ConfigError(
                f"log.observers names `{name}`, which no installed package offers (installed: {installed})",
                hint=f"install the package that has `{name}` among its entry points {ENTRY_POINTS}",
            )
    observers = list[Observer]()
    for name in names:
        try:
            observers.append(offered[name].load()())
        except Exception as error:
            raise ConfigError(
                f"log.observers `{name}` ({offered[name].value}) cannot be made: {type(error).__name__}: {error}",
                hint="its entry point must refer to a callable without arguments",
            ) from error
    return observers


class OutsideObservers(Observer):
    """Calls observers of users with the record of each step, one after another. If an observer on any rank gives a
    reason to stop, the run ends on all ranks.

    `gather` returns the texts of all ranks. RunError if an observer raises an error, changes values of the record, or
    returns something other than a record or None.
    """

    def __init__(self, observers: Sequence[Observer], gather: Callable[[str], Sequence[str]]) -> None:
        self._observers, self._gather = observers, gather

    def after_step(self, record: StepRecord) -> StepRecord:
        """Call the observers with a step's record. Collective: if ranks stop, the lowest rank's reason counts."""
        for observer in self._observers:
            name, where = type(observer).__name__, f"after step {record.step}"
            try:
                returned = observer.after_step(record)
            except FinetuneError:
                raise
            except Exception as error:
                raise RunError(
                    f"observer {name} failed {where}: {type(error).__name__}: {error}",
                    hint="correct the observer; the same command resumes from the last checkpoint",
                ) from error
            if returned is None:
                continue
            if not isinstance(returned, StepRecord) or not returned.values.items() >= record.values.items():
                raise RunError(
                    f"observer {name} returned {returned!r:.200} {where}",
                    hint="return None, or what `record.with_values` or `record.stopping` returns; new values need new "
                    "names",
                )
            record = returned
        reason = next(filter(None, self._gather(record.stop)), "")
        return record.stopping(reason)

    def close(self) -> None:
        """Close each observer that has a method `close`."""
        for observer in self._observers:
            if hasattr(observer, "close"):
                observer.close()
