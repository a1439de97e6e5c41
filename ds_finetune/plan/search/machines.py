"""Machines for which a run is planned: those that the command line names, or this one. Also a table of GPUs with their
memory and dense peak FLOP/s from data sheets, to which model FLOPs utilisation refers.

FLOP/s that a data sheet gives with sparsity are halved. fp32 peaks are without tensor cores, as in torch's default fp32
matrix products.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ds_finetune.config.units import GIB
from ds_finetune.errors import ConfigError
from ds_finetune.plan.precision import Bf16Support
from ds_finetune.plan.search.candidates import Ranks
from ds_finetune.plan.search.fitting import HOST_SHARE, Budget
from ds_finetune.system.free_memory import available_bytes, total_bytes

_GB, _TERA = 10**9, 1e12


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
    _row("a100-40g", 40 * GIB, (312, 19.5), r"(?:A100|A800)(?:-(?:SXM\d|PCIE|PCIe)-40GB| 40GB PCIe)"),
    _row("a100-80g", 80 * GIB, (312, 19.5), r"(?:A100|A800)(?:-(?:SXM\d|PCIE|PCIe)-80GB| 80GB PCIe)"),
    _row("h100-80g", 80 * GIB, (989, 67), r"(?:H100|H800)(?: SXM5)?(?: 80GB)?(?: HBM\w+)?"),
    _row("h100-pcie-80g", 80 * GIB, (756, 51), r"(?:H100|H800)(?: 80GB)?(?: HBM\w+)? PCIe"),
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
    _row("rtx4090-24g", 24 * GIB, (165.2, 82.6), "GeForce RTX 4090"),
    _row("rtx3090-24g", 24 * GIB, (71, 35.6), "GeForce RTX 3090"),
    _row("v100-16g", 16 * GIB, (125, 15.7), r"(?:Tesla )?V100-SXM\d-16GB"),
    _row("v100-32g", 32 * GIB, (125, 15.7), r"(?:Tesla )?V100-SXM\d-32GB"),
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


CPU = "cpu"
"""Given as the name of a GPU, this stands for CPU ranks on this machine."""
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Request:
    """Machines that the command line describes; options that are not given are None."""

    gpu: str | None = None
    """Name of the GPU, or `cpu`."""
    gpus: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    host_bytes: int | None = None
    models: tuple[str, ...] = ()
    """Driver names of this machine's GPUs, used where no GPU is named."""
    gpu_bytes: int | None = None
    """Memory in bytes of a GPU that is not in the table."""


@dataclass(frozen=True)
class Target:
    """Ranks of a plan, with GPU and memory per rank where they are known."""

    ranks: Ranks
    gpu: GpuModel | None = None
    budget: Budget | None = None
    notes: tuple[str, ...] = ()
    is_named: bool = True
    """False if the command line names no machines and this machine has no GPU, so that the plan is for its CPU; else
    true.
    """

    @property
    def name(self) -> str:
        """Text such as `8 x h100-80g`."""
        if self.ranks.device == "cpu":
            return f"{self.ranks.number} CPU rank{'s' * (self.ranks.number > 1)}"
        memory = "" if self.budget is None else f" of {self.budget.device_bytes / GIB:,.1f} GiB"
        return f"{self.ranks.number} x {self.gpu.name if self.gpu is not None else f'GPU{memory}'}"

    @property
    def bf16(self) -> Bf16Support | None:
        """bf16 support of the GPU by the table; None for an unknown GPU, and for CPUs, which are examined later."""
        return None if self.gpu is None else Bf16Support(self.gpu.name, is_native=self.gpu.has_bf16)


def target_of(request: Request) -> Target:
    """Machines of a request; ConfigError where its numbers contradict, or the GPU is not in the table."""
    models = request.models if request.gpu is None else ()
    if request.gpu == CPU or not (request.gpu or request.gpus or request.gpu_bytes or models):
        ranks = _ranks(request, usual=request.gpus or 1, device="cpu")
        host = request.host_bytes or available_bytes()
        budget = Budget(host // ranks.number, host // ranks.number)
        return Target(ranks, budget=budget, is_named=request.gpu == CPU)
    usual = len(models) or GPUS_PER_NODE
    ranks = _ranks(request, usual=usual)
    gpu = gpu_named(request.gpu) if request.gpu is not None else _gpu_here(models, request)
    memory = gpu.memory_bytes if gpu is not None else request.gpu_bytes
    if memory is None:
        # Without a GPU's name or memory, only the number of GPUs is known.
        return Target(ranks)
    here = total_bytes() if models else HOST_SHARE * ranks.per_node * memory
    host = request.host_bytes or here
    note = f"a node is assumed to have {host / GIB:,.0f} GiB of host memory; --host-memory says otherwise"
    notes = () if models or request.host_bytes else (note,)
    return Target(ranks, gpu, Budget(memory, host // ranks.per_node), notes)


def _gpu_here(models: tuple[str, ...], request: Request) -> GpuModel | None:
    if not models or request.gpu_bytes is not None:
        return None
    if (gpu := gpu_of_device(models[0])) is None:
        raise ConfigError(
            f"the GPU `{models[0]}` of this machine is not in the table",
            hint="give its memory by --gpu-memory, e.g. --gpu-memory 40GiB, or plan for another one by --gpu NAME",
        )
    return gpu


def _ranks(request: Request, *, usual: int, device: str = "cuda") -> Ranks:
    gpus = request.gpus or (request.nodes or 1) * (request.gpus_per_node or usual)
    per_node = min(gpus, request.gpus_per_node or (gpus // request.nodes if request.nodes else usual))
    if per_node < 1 or gpus % per_node or (request.nodes and gpus != request.nodes * per_node):
        what = f"{request.nodes} nodes" if request.nodes else f"nodes of {per_node}"
        raise ConfigError(
            f"{gpus} GPUs do not fill {what}",
            hint="set --gpus to a multiple of the GPUs of a node, or set --gpus-per-node",
        )
    return Ranks(gpus, per_node, device)
