"""Machines for which a run is planned: those named on the command line, or this one."""

from dataclasses import dataclass

from ds_finetune.config.units import GIB
from ds_finetune.errors import ConfigError
from ds_finetune.plan.estimate.peaks import GpuModel, gpu_named, gpu_of_device
from ds_finetune.plan.precision import Bf16Support
from ds_finetune.plan.search.candidates import Ranks
from ds_finetune.plan.search.fitting import HOST_SHARE, Budget
from ds_finetune.system.free_memory import available_bytes, total_bytes

CPU = "cpu"
"""Name that stands for this machine's CPU ranks where a GPU could be named."""
GPUS_PER_NODE = 8
"""Default number of GPUs per node."""


@dataclass(frozen=True)
class Request:
    """Machines that the command line describes; options that are not given are None."""

    gpu: str | None = None
    """Name of the GPU, or `cpu`."""
    gpus: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    host_bytes: int | None = None
    """Memory of a node in bytes."""
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
    """Notes for the user on what is assumed about the machines."""
    is_named: bool = True
    """Whether the machines were named on the command line or are this machine's GPUs. False if the plan is for this
    machine's CPU because the machine has no GPU.
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
        """bf16 support of the GPU by the table; None for an unknown GPU, and for CPUs, which are tested later."""
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
