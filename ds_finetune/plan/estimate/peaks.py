"""Table of GPUs: memory, and dense peak FLOP/s as reference of model FLOPs utilisation, from data sheets.

FLOP/s that a data sheet gives with sparsity are halved. fp32 peaks are without tensor cores, as in torch's default fp32
matrix products.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ds_finetune.errors import ConfigError

_GIB, _GB, _TERA = 2**30, 10**9, 1e12


@dataclass(frozen=True)
class GpuModel:
    """A row of the table of GPUs."""

    name: str
    memory_bytes: int
    half_flops: float
    """Dense peak FLOP/s of bf16 and fp16 matrix products with fp32 accumulation."""
    fp32_flops: float
    device_names: str
    """Pattern of the complete names that drivers report, without `NVIDIA `; MIG slices do not match."""
    has_bf16: bool

    def peak(self, precision: str) -> float:
        """Dense peak FLOP/s of matrix products in a precision."""
        return self.fp32_flops if precision == "fp32" else self.half_flops


def _row(name: str, memory_bytes: int, teraflops: tuple[float, float], device_names: str) -> GpuModel:
    has_bf16 = not name.startswith(("v100", "t4"))
    return GpuModel(name, memory_bytes, teraflops[0] * _TERA, teraflops[1] * _TERA, device_names, has_bf16)


# Columns: name, memory, TFLOP/s in 16 bits and in fp32, pattern of the names that drivers report.
_ROWS = (
    _row("a100-40g", 40 * _GIB, (312, 19.5), r"(?:A100|A800)(?:-(?:SXM\d|PCIE|PCIe)-40GB| 40GB PCIe)"),
    _row("a100-80g", 80 * _GIB, (312, 19.5), r"(?:A100|A800)(?:-(?:SXM\d|PCIE|PCIe)-80GB| 80GB PCIe)"),
    _row("h100-80g", 80 * _GIB, (989, 67), r"(?:H100|H800)(?: SXM5)?(?: 80GB)?(?: HBM\w+)?"),
    _row("h100-pcie-80g", 80 * _GIB, (756, 51), r"(?:H100|H800)(?: 80GB)?(?: HBM\w+)? PCIe"),
    _row("h100-nvl-94g", 94 * _GB, (835, 60), r"H100(?: 94GB)?(?: HBM\w+)? NVL"),
    _row("h200-141g", 141 * _GB, (989, 67), r"H200(?: 141GB)?(?: HBM\w+)?"),
    _row("h200-nvl-141g", 141 * _GB, (835, 60), r"H200(?: 141GB)?(?: HBM\w+)? NVL"),
    _row("gh200-96g", 96 * _GB, (989, 67), r"GH200(?: 480GB| 96GB)?(?: HBM3)?"),
    _row("gh200-144g", 144 * _GB, (989, 67), r"GH200(?: 144G\w*)(?: HBM3e)?"),
    _row("h20-96g", 96 * _GB, (148, 44), r"H20(?: 96GB| HBM\w+|-3e|-\d+\w*)*"),
    _row("b200-180g", 180 * _GB, (2250, 75), r"B200(?: \d+GB)?(?: HBM\w+)?"),
    _row("b300-288g", 288 * _GB, (2250, 75), r"B300(?: SXM\d)?(?: AC)?(?: \d+GB)?(?: HBM\w+)?"),
    _row("gb200-186g", 186 * _GB, (2500, 80), r"GB200(?: \d+GB)?(?: HBM\w+)?"),
    _row("gb300-288g", 288 * _GB, (2500, 80), r"GB300(?: \d+GB)?(?: HBM\w+)?"),
    _row("l40s-48g", 48 * _GB, (362, 91.6), "L40S"),
    _row("l40-48g", 48 * _GB, (181, 90.5), "L40"),
    _row("l4-24g", 24 * _GB, (121, 30.3), "L4"),
    _row("a10-24g", 24 * _GB, (125, 31.2), "A10"),
    _row("a10g-24g", 24 * _GB, (70, 35), "A10G"),
    _row("a30-24g", 24 * _GB, (165, 10.3), "A30"),
    _row("a40-48g", 48 * _GB, (149.7, 37.4), "A40"),
    _row("rtx4090-24g", 24 * _GIB, (165.2, 82.6), "GeForce RTX 4090"),
    _row("rtx3090-24g", 24 * _GIB, (71, 35.6), "GeForce RTX 3090"),
    _row("v100-16g", 16 * _GIB, (125, 15.7), r"(?:Tesla )?V100-SXM\d-16GB"),
    _row("v100-32g", 32 * _GIB, (125, 15.7), r"(?:Tesla )?V100-SXM\d-32GB"),
    _row("t4-16g", 16 * _GB, (65, 8.1), "(?:Tesla )?T4"),
    _row("mi300x-192g", 192 * _GB, (1307.4, 163.4), "AMD Instinct MI300X"),
)
GPUS: Mapping[str, GpuModel] = {row.name: row for row in _ROWS}


def gpu_named(name: str) -> GpuModel:
    """The GPU with a name of the table, such as `h100-80g`; ConfigError with all names for an unknown one."""
    if (gpu := GPUS.get(name.lower())) is not None:
        return gpu
    plain = re.sub("[^a-z0-9]|nvidia", "", name.lower()).replace("gb", "g")
    nearest = [name_of_gpu for name_of_gpu in GPUS if plain and plain in name_of_gpu.replace("-", "")]
    nearest = nearest or difflib.get_close_matches(name.lower(), GPUS, n=2, cutoff=0.4)
    likely = f"nearest: {', '.join(nearest)}; " if nearest else ""
    raise ConfigError(
        f"GPU `{name}` is not in the table",
        hint=f"{likely}give one of {', '.join(GPUS)}, or its memory by --gpu-memory",
    )


def gpu_of_device(device_name: str) -> GpuModel | None:
    """The GPU whose name the driver reports, as in `NVIDIA H100 80GB HBM3`; None where it is not in the table."""
    plain = device_name.removeprefix("NVIDIA ").strip()
    return next((row for row in GPUS.values() if re.fullmatch(row.device_names, plain)), None)
