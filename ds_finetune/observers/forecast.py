"""Compares the forecast of a run with what its first steps measured."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from ds_finetune.config.units import GIB
from ds_finetune.console.phase_line import Say
from ds_finetune.observers.record import Observer, StepRecord

MEASURED_STEPS = 20
_WARM_UP = 1
"""Steps that are left out of the time: kernels are chosen and memory is first allocated in them."""


@dataclass(frozen=True)
class Predicted:
    """What was predicted: the peak of the memory of a rank's device, and the time of a step; None where it is not
    known.
    """

    device_bytes: int | None
    step_seconds: float | None
    is_host: bool = False
    """Whether the device is the host's CPU, where what is measured is how much a whole process grew."""

    def texts(self, *, measured_bytes: float, measured_seconds: float) -> list[str]:
        """Each number beside what was measured."""
        found = []
        if self.device_bytes is not None:
            found.append(f"memory of the fullest rank {self._memory_text(self.device_bytes, measured_bytes)}")
        if self.step_seconds is not None:
            seconds = f"{self.step_seconds:.3f} s predicted, {measured_seconds:.3f} s measured"
            found.append(f"step {seconds} ({_error(self.step_seconds, measured_seconds)})")
        return found

    def _memory_text(self, predicted: int, measured: float) -> str:
        text, found = f"{predicted / GIB:.3f} GiB predicted", f"{measured / GIB:.3f} GiB"
        if self.is_host:
            return f"{text} for tensors; its process grew by {found}, with libraries and freed memory that it keeps"
        return f"{text}, {found} measured ({_error(predicted, measured)})"


class ForecastCheck(Observer):
    """After MEASURED_STEPS steps of this start, adds what was predicted and measured to the record, and says it in a
    line.
    """

    def __init__(
        self,
        predicted: Predicted,
        peak_bytes: Callable[[], int],
        over_ranks: Callable[[float], float],
        say: Say,
    ) -> None:
        self._predicted, self._peak_bytes, self._over_ranks, self._say = predicted, peak_bytes, over_ranks, say
        self._seconds: list[float] = []

    def after_step(self, record: StepRecord) -> StepRecord:
        """Count the step; `over_ranks` is called once, at the same step on every rank."""
        self._seconds.append(record.values["perf/step_seconds"])
        if len(self._seconds) != MEASURED_STEPS:
            return record
        peak, seconds = self._over_ranks(float(self._peak_bytes())), median(self._seconds[_WARM_UP:])
        texts = self._predicted.texts(measured_bytes=peak, measured_seconds=seconds)
        if texts:
            self._say(f"after {MEASURED_STEPS} steps: {'; '.join(texts)}")
        return record.with_values(self._values(peak))

    def _values(self, peak: float) -> dict[str, float]:
        values = {"memory/measured_gib": peak / GIB}
        if self._predicted.device_bytes is not None:
            values["memory/predicted_gib"] = self._predicted.device_bytes / GIB
        if self._predicted.step_seconds is not None:
            values["perf/predicted_step_seconds"] = self._predicted.step_seconds
        return values


def _error(predicted: float, measured: float) -> str:
    """By how much the prediction misses what was measured."""
    return f"{(predicted - measured) / measured:+.0%}" if measured else "nothing was measured"
