"""The machines that a run is planned for: those that the command line names, or this one."""

import os
from dataclasses import dataclass

from ds_finetune.config.units import GIB
from ds_finetune.errors import ConfigError
from ds_finetune.plan.estimate.accelerators import (
    CpuRates,
    Machine,
    accelerator,
    accelerator_of_device,
    cpu_machine,
    machine_of,
    rates_file,
)
from ds_finetune.plan.precision import Bf16Support, cpu_support
from ds_finetune.plan.search.candidates import Ranks
from ds_finetune.plan.search.fitting import HOST_SHARE, Budget
from ds_finetune.system.free_memory import available_bytes, total_bytes

CPU = "cpu"
"""The name of this machine's CPU ranks."""
_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Request:
    """What the command line says of the machines; None where it says nothing."""

    gpu: str | None = None
    """Name of the accelerator, or `cpu`."""
    gpus: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    host_bytes: int | None = None
    """Memory of a node."""
    models: tuple[str, ...] = ()
    """Models of the GPUs of this machine, by their drivers' names; asked for where `gpu` is None."""


@dataclass(frozen=True)
class Target:
    """The ranks of a plan, and where the accelerator is known, its rates and memory."""

    ranks: Ranks
    machine: Machine | None = None
    budget: Budget | None = None
    notes: tuple[str, ...] = ()
    """What is assumed of the machines."""

    @property
    def bf16(self) -> Bf16Support | None:
        """Whether known GPUs have products in bf16; None for others, and for a CPU, which answers itself."""
        if self.machine is None or self.ranks.device == "cpu":
            return None
        row = self.machine.accelerator
        return Bf16Support(row.name, is_native=row.has_bf16)


def target_of(request: Request, *, precision: str = "bf16") -> Target:
    """The machines that a request names; ConfigError where its numbers contradict, or the accelerator is unknown.

    CPU ranks have rates where they were measured in the `precision` of the run.
    """
    if request.gpu == CPU:
        return _cpu_ranks(request, precision)
    models = request.models if request.gpu is None else ()
    if request.gpu is None and not models:
        if request.gpus is None:
            return _cpu_ranks(request, precision)
        # Nothing but their number is known.
        return Target(_ranks(request, usual=_GPUS_PER_NODE, default=_GPUS_PER_NODE))
    row = accelerator(request.gpu) if request.gpu is not None else accelerator_of_device(models[0])
    usual = len(models) or row.gpus_per_node
    ranks = _ranks(request, usual=usual, default=usual)
    machine = machine_of(row, gpus_per_node=ranks.per_node)
    here = total_bytes() if models else HOST_SHARE * ranks.per_node * row.memory_bytes
    host = request.host_bytes or here
    note = f"a node is assumed to have {host / GIB:,.0f} GiB of host memory; --host-memory says otherwise"
    notes = () if models or request.host_bytes else (note,)
    return Target(ranks, machine, Budget(row.memory_bytes, host // ranks.per_node), notes)


def _cpu_ranks(request: Request, precision: str) -> Target:
    """Ranks on the cores of this machine, which share its memory."""
    ranks = _ranks(request, usual=request.gpus or 1, default=1, device="cpu")
    host = request.host_bytes or available_bytes()
    budget = Budget(host // ranks.number, host // ranks.number)
    precision = ("bf16" if cpu_support().is_native else "fp32") if precision == "auto" else precision
    file = rates_file(ranks.number, precision=precision, threads=max(1, (os.cpu_count() or 1) // ranks.number))
    rates = CpuRates.read(file)
    machine = cpu_machine(rates, ranks=ranks.number, memory_bytes=host) if rates is not None else None
    return Target(ranks, machine, budget)


def _ranks(request: Request, *, usual: int, default: int, device: str = "cuda") -> Ranks:
    """The ranks of a request, on nodes of `usual` GPUs where it does not say how many they have."""
    gpus = request.gpus or (request.nodes or 1) * (request.gpus_per_node or default)
    per_node = min(gpus, request.gpus_per_node or (gpus // request.nodes if request.nodes else usual))
    if per_node < 1 or gpus % per_node or (request.nodes and gpus != request.nodes * per_node):
        what = f"{request.nodes} nodes" if request.nodes else f"nodes of {per_node}"
        raise ConfigError(
            f"{gpus} GPUs do not fill {what}", hint="give a multiple, or say how many a node has by --gpus-per-node"
        )
    return Ranks(gpus, per_node, device)
