"""Model FLOPs utilisation: what the step's tokens need by arithmetic, over what the accelerators could have done."""

from dataclasses import dataclass

from ds_finetune.observers.record import StepRecord

PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}
"""Dense bf16 tensor peak by a part of the device's name, from the vendors' data sheets."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of a device, or None where it is not known."""
    return next((peak for part, peak in PEAK_BF16_FLOPS.items() if part in device_name), None)


@dataclass
class Utilisation:
    """Adds `perf/mfu`: model FLOPs of the tokens (recomputation not counted) over the dense bf16 peak of all ranks."""

    flops_per_token: float
    peak_flops: float
    world_size: int

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the value."""
        share = record.values["perf/tokens_per_second"] * self.flops_per_token / (self.peak_flops * self.world_size)
        return record.with_values({"perf/mfu": share})

    def close(self) -> None:
        """Nothing is held back."""
