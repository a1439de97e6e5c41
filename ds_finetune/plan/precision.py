"""Resolves `train.precision: auto`: bf16 where the device computes matrix products in bf16, and fp32 on other CPUs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ds_finetune.config.sections import TrainConfig
from ds_finetune.errors import ConfigError

ROW_BYTES = 16
"""torch's grouped product needs experts' matrices whose row size in bytes is a multiple of this number."""
WEIGHT_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
OLDEST_BF16 = (8, 0)
"""Minimum compute capability of GPUs that compute matrix products in bf16."""
_CPU_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}
"""CPU instructions for matrix products in bf16, by their flags in /proc/cpuinfo."""


@dataclass(frozen=True)
class Bf16Support:
    """Whether a device computes matrix products in bf16 (`is_native`); other devices emulate them."""

    device: str
    """Name of the device and how its support was determined, such as `NVIDIA H100 PCIe (compute capability 9.0)`."""
    is_native: bool


_ASSUMED = Bf16Support("a GPU of compute capability 8.0 or later, as is assumed,", is_native=True)


@cache
def cpu_support(cpuinfo: Path = Path("/proc/cpuinfo")) -> Bf16Support:
    """bf16 support of this machine's CPU, read from `cpuinfo`; without that file the CPU counts as having none."""
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    instructions = [name for flag, name in _CPU_FLAGS.items() if flag in flags]
    return Bf16Support(
        f"this CPU ({' and '.join(instructions) or 'neither AMX nor AVX512-BF16'})", is_native=bool(instructions)
    )


def with_precision(
    train: TrainConfig, *, device: str, support: Bf16Support | None = None
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Resolve `auto` precision for a `device` (`cpu` or `cuda`). A returned line gives the reason, or says that the
    requested bf16 is emulated.

    Without `support`, this machine's CPU is examined, or a GPU is assumed to compute matrix products in bf16.
    ConfigError for `auto` on a GPU that does not compute them in bf16.
    """
    support = support or (cpu_support() if device == "cpu" else _ASSUMED)
    computes = "computes" if support.is_native else "does not compute"
    if train.precision != "auto":
        if train.precision != "bf16" or support.is_native:
            return train, ()
        slow = "steps take about 30 times as long as in fp32" if device == "cpu" else "fp16 and fp32 are much faster"
        return train, (f"train.precision bf16: {support.device} only emulates matrix products in bf16; {slow}",)
    if device != "cpu" and not support.is_native:
        raise ConfigError(
            f"train.precision auto: {support.device} {computes} matrix products in bf16",
            hint="set train.precision to fp16 or fp32",
        )
    chosen = "bf16" if support.is_native else "fp32"
    line = f"train.precision auto is {chosen}: {support.device} {computes} matrix products in bf16"
    return train.model_copy(update={"precision": chosen}), (line,)


def wider(precision: str) -> str:
    """Hint for experts' weight matrices whose rows, in this precision, are not a multiple of 16 bytes."""
    other = "train a model of other widths"
    return other if precision == "fp32" else f"set train.precision: fp32, or {other}"
