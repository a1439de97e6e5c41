"""Model FLOPs utilisation: what the step's tokens need by arithmetic, over what the accelerators could have done."""

import re
from dataclasses import dataclass

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
