"""Observers of performance: model FLOPs utilisation (MFU), and peak memory as predicted and as measured."""

from collections.abc import Callable
from dataclasses import dataclass

from ds_finetune.config.units import GIB
from ds_finetune.console.phase_line import Say
from ds_finetune.observers.record import Observer, StepRecord

MEASURED_STEPS = 20


@dataclass
class Utilisation(Observer):
    """Adds the model FLOPs utilisation `perf/mfu`: model FLOPs per second, divided by the dense peak of all ranks.

    `flops_per_token` are the model FLOPs of a token in forward and backward, and `peak_flops` is the dense peak of one
    rank in the precision of the run.
    """

    flops_per_token: float
    peak_flops: float
    world_size: int

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add `perf/mfu` to the record."""
        mfu = record.values["perf/tokens_per_second"] * self.flops_per_token / (self.peak_flops * self.world_size)
        return record.with_values({"perf/mfu": mfu})


@dataclass
class MemoryCheck(Observer):
    """After 20 steps of this process, adds the predicted and the measured peak memory to the record, and prints them.

    The measured peak is the highest of all ranks. Without a prediction only the measured value is added.
    On CPUs (`is_host`) the measured value is the growth of the whole process.
    """

    predicted: int | None
    peak_bytes: Callable[[], int]
    over_ranks: Callable[[float], float]
    say: Say
    is_host: bool = False
    _steps: int = 0

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the memory metrics at the 20th step of this process. Collective at that step: `over_ranks` returns the
        maximum over ranks.
        """
        self._steps += 1
        if self._steps != MEASURED_STEPS:
            return record
        peak = self.over_ranks(float(self.peak_bytes()))
        values = {"memory/measured_gib": peak / GIB}
        if self.predicted is not None:
            values["memory/predicted_gib"] = self.predicted / GIB
            text = self._text(self.predicted, peak)
            self.say(f"after {MEASURED_STEPS} steps: memory of the fullest rank {text}")
        return record.with_values(values)

    def _text(self, predicted: int, measured: float) -> str:
        text, size = f"{predicted / GIB:.3f} GiB predicted", f"{measured / GIB:.3f} GiB"
        if self.is_host:
            return f"{text} for tensors; its process grew by {size}, with libraries and freed memory that it keeps"
        error = f"{(predicted - measured) / measured:+.0%}" if measured else "nothing was measured"
        return f"{text}, {size} measured ({error})"
