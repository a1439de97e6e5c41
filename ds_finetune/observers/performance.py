"""What accelerators do: model FLOPs utilisation, and the forecast of a run against what its first steps measured."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from ds_finetune.config.units import GIB
from ds_finetune.console.phase_line import Say
from ds_finetune.observers.record import Observer, StepRecord

_SIZES = r"(?: \d+GB)?(?: HBM\w+)?"
PEAK_BF16_FLOPS = (
    (rf"(?:A100|A800)-(?:SXM\d|PCIE|PCIe)(?:-\d+GB)?|(?:A100|A800){_SIZES} PCIe", 312e12),
    (rf"(?:H100|H800){_SIZES}", 989e12),
    (rf"(?:H100|H800){_SIZES} PCIe|(?:H100|H800) PCIe", 756e12),
    (rf"(?:H100|H200){_SIZES} NVL|(?:H100|H200) NVL", 835e12),
    (rf"H200{_SIZES}|GH200{_SIZES}", 989e12),
    (rf"H20{_SIZES}|H20-\d+\w*", 148e12),
    (rf"B200{_SIZES}|B300(?: SXM\d)?(?: AC)?{_SIZES}", 2250e12),
    (rf"GB200{_SIZES}|GB300{_SIZES}", 2500e12),
    ("A10", 125e12),
    ("A30", 165e12),
    ("A40", 149.7e12),
    ("L4", 121e12),
    ("L40", 181e12),
    ("L40S", 362e12),
    ("GeForce RTX 4090", 165.2e12),
)
"""Dense bf16 tensor peak (accumulated in fp32) by a pattern of the whole device name without `NVIDIA`, from the data
sheets.
"""
MEASURED_STEPS = 20
_WARM_UP = 1
"""Steps that are left out of the time: kernels are chosen and memory is first allocated in them."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of a device, or None where it is not known, as of a MIG slice."""
    name = device_name.removeprefix("NVIDIA ").strip()
    return next((peak for pattern, peak in PEAK_BF16_FLOPS if re.fullmatch(pattern, name)), None)


@dataclass
class Utilisation(Observer):
    """Adds `perf/mfu`: model FLOPs of the tokens (recomputation not counted) over the dense bf16 peak of all ranks."""

    flops_per_token: float
    peak_flops: float
    world_size: int

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the value."""
        share = record.values["perf/tokens_per_second"] * self.flops_per_token / (self.peak_flops * self.world_size)
        return record.with_values({"perf/mfu": share})


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
        self, predicted: Predicted, peak_bytes: Callable[[], int], over_ranks: Callable[[float], float], say: Say
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
