"""Accelerators by name, and the machines that a run is planned for: peaks, memory, bandwidths and links, with sources.

Rates are bytes a second in one direction, FLOP/s are of dense products; a datasheet's numbers with sparsity are halved.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_finetune.errors import ConfigError

GB, TB, TERA = 1e9, 1e12, 1e12
"""Vendors count bandwidths, and the memory of GDDR cards too, in powers of ten."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One accelerator, and the node that it is typically sold in."""

    name: str
    memory_bytes: int
    bf16_flops: float
    """Dense peak of 16-bit products that are added in fp32."""
    fp32_flops: float
    """Peak of fp32 without tensor cores, as torch multiplies fp32 matrices by default."""
    memory_bandwidth: float
    intra_node_bytes_per_s: float
    """What one accelerator sends to others of its node."""
    inter_node_bytes_per_s: float
    """An accelerator's share of its node's network cards."""
    pcie_bytes_per_s: float
    """Between the accelerator and its host."""
    gpus_per_node: int = 8
    has_bf16: bool = True
    network: str = ""
    """What the rate between nodes assumes."""
    device_names: tuple[str, ...] = ()
    """Names that the driver reports."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that kernels reach, and costs that no roofline has. All of them are assumptions."""

    matmul: float = 0.80
    """Of the peak, by large products: 798 of 989 TFLOP/s were measured on an H100 (bf16, 8192 by 8192 by 8192)."""
    head: float = 0.80
    """Of the peak, by the products of a language model's head."""
    grouped: float = 0.55
    """Of the peak, by the products of routed experts, whose numbers of rows differ."""
    attention: float = 0.55
    """Of the peak, by attention over documents, forward and backward together."""
    memory: float = 0.85
    """Of the memory's bandwidth: 3.0 of 3.35 TB/s were measured on an H100 by copies; other kernels reach less."""
    new_memory: float = 1.0
    """Of that, by operators whose results are new memory: all of it where an allocator keeps memory, as on GPUs."""
    link: float = 0.75
    """Of a link's rate, by collectives of many megabytes."""
    host_link: float = 0.80
    """Of PCIe's rate, with pinned memory: 50 to 55 of 64 GB/s."""
    hidden: float = 0.80
    """Of the traffic that may run beside computation, the share that does so at best."""
    launch_seconds: float = 5e-6
    """Of the host for a kernel, where kernels are shorter than that."""
    message_seconds: float = 20e-6
    """Of a collective without data."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run is planned for: equal nodes of equal accelerators, or CPU ranks of this machine."""

    accelerator: Accelerator
    gpus_per_node: int
    host_bandwidth: float = 200 * GB
    """Of a node's memory, for optimizers in host memory."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    blocks_host: bool = False
    """Whether collectives block the ranks, so that none runs beside computation, as on CPUs."""
    calls_each_document: bool = False
    """Whether attention is called for each document, as on CPUs; on GPUs one call attends within all of a forward."""
    notes: tuple[str, ...] = ()
    """Where rates were measured rather than taken from the table, as sentences."""

    @property
    def intra_node_bytes_per_s(self) -> float:
        """What a rank sends to others of its node."""
        return self.accelerator.intra_node_bytes_per_s

    @property
    def inter_node_bytes_per_s(self) -> float:
        """A rank's share of what its node sends to others."""
        return self.accelerator.inter_node_bytes_per_s


_A100 = "https://www.nvidia.com/en-us/data-center/a100/"
_H100 = "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-datasheet"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_DGX_B200 = "https://www.nvidia.com/en-us/data-center/dgx-b200/"
_DGX_A100 = "200 Gb/s for each GPU, as in a DGX A100"
_DGX_H100 = "400 Gb/s for each GPU, as in a DGX H100"
_SHARED_100G = "100 Gb/s for 8 GPUs"
_DESKTOP = "10 Gb/s Ethernet for the node (an assumption: such cards are in workstations)"

ACCELERATORS: Mapping[str, Accelerator] = {
    row.name: row
    for row in (
        Accelerator(
            name="a100-40g",
            memory_bytes=40 * 2**30,
            bf16_flops=312 * TERA,
            fp32_flops=19.5 * TERA,
            memory_bandwidth=1555 * GB,
            intra_node_bytes_per_s=300 * GB,
            inter_node_bytes_per_s=25 * GB,
            pcie_bytes_per_s=32 * GB,
            network=_DGX_A100,
            device_names=("A100-SXM4-40GB", "A100-PCIE-40GB"),
            source=_A100,
        ),
        Accelerator(
            name="a100-80g",
            memory_bytes=80 * 2**30,
            bf16_flops=312 * TERA,
            fp32_flops=19.5 * TERA,
            memory_bandwidth=2039 * GB,
            intra_node_bytes_per_s=300 * GB,
            inter_node_bytes_per_s=25 * GB,
            pcie_bytes_per_s=32 * GB,
            network=_DGX_A100,
            device_names=("A100-SXM4-80GB",),
            source=_A100,
        ),
        Accelerator(
            name="h100-80g",
            memory_bytes=80 * 2**30,
            bf16_flops=989 * TERA,
            fp32_flops=67 * TERA,
            memory_bandwidth=3350 * GB,
            intra_node_bytes_per_s=450 * GB,
            inter_node_bytes_per_s=50 * GB,
            pcie_bytes_per_s=64 * GB,
            network=_DGX_H100,
            device_names=("H100 80GB HBM3", "H100 SXM5 80GB"),
            source=_H100,
        ),
        Accelerator(
            name="h100-pcie-80g",
            memory_bytes=80 * 2**30,
            bf16_flops=756 * TERA,
            fp32_flops=51 * TERA,
            memory_bandwidth=2000 * GB,
            intra_node_bytes_per_s=64 * GB,
            inter_node_bytes_per_s=6.25 * GB,
            pcie_bytes_per_s=64 * GB,
            network="400 Gb/s for 8 GPUs (an assumption), and PCIe alone between the GPUs of a node",
            device_names=("H100 PCIe",),
            source=_H100,
        ),
        Accelerator(
            name="h200-141g",
            memory_bytes=141 * 10**9,
            bf16_flops=989 * TERA,
            fp32_flops=67 * TERA,
            memory_bandwidth=4800 * GB,
            intra_node_bytes_per_s=450 * GB,
            inter_node_bytes_per_s=50 * GB,
            pcie_bytes_per_s=64 * GB,
            network=_DGX_H100,
            device_names=("H200", "H200 141GB HBM3e"),
            source="https://www.nvidia.com/en-us/data-center/h200/",
        ),
        Accelerator(
            name="b200-180g",
            memory_bytes=180 * 10**9,
            bf16_flops=2250 * TERA,
            fp32_flops=75 * TERA,
            memory_bandwidth=8000 * GB,
            intra_node_bytes_per_s=900 * GB,
            inter_node_bytes_per_s=50 * GB,
            pcie_bytes_per_s=64 * GB,
            network="400 Gb/s for each GPU, as in a DGX B200",
            device_names=("B200", "B200 180GB HBM3e"),
            source=f"https://www.nvidia.com/en-us/data-center/hgx/ and {_DGX_B200}",
        ),
        Accelerator(
            name="l40s-48g",
            memory_bytes=48 * 10**9,
            bf16_flops=362 * TERA,
            fp32_flops=91.6 * TERA,
            memory_bandwidth=864 * GB,
            intra_node_bytes_per_s=32 * GB,
            inter_node_bytes_per_s=6.25 * GB,
            pcie_bytes_per_s=32 * GB,
            network="400 Gb/s for 8 GPUs, as in AWS g6e.48xlarge",
            device_names=("L40S",),
            source="https://www.nvidia.com/en-us/data-center/l40s/",
        ),
        Accelerator(
            name="l4-24g",
            memory_bytes=24 * 10**9,
            bf16_flops=121 * TERA,
            fp32_flops=30.3 * TERA,
            memory_bandwidth=300 * GB,
            intra_node_bytes_per_s=32 * GB,
            inter_node_bytes_per_s=1.5625 * GB,
            pcie_bytes_per_s=32 * GB,
            network=f"{_SHARED_100G}, as in AWS g6.48xlarge",
            device_names=("L4",),
            source="https://www.nvidia.com/en-us/data-center/l4/",
        ),
        Accelerator(
            name="a10g-24g",
            memory_bytes=24 * 10**9,
            bf16_flops=70 * TERA,
            fp32_flops=35 * TERA,
            memory_bandwidth=600 * GB,
            intra_node_bytes_per_s=32 * GB,
            inter_node_bytes_per_s=1.5625 * GB,
            pcie_bytes_per_s=32 * GB,
            network=f"{_SHARED_100G}, as in AWS g5.48xlarge",
            device_names=("A10G",),
            source="https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
        ),
        Accelerator(
            name="rtx4090-24g",
            memory_bytes=24 * 2**30,
            bf16_flops=165.2 * TERA,
            fp32_flops=82.6 * TERA,
            memory_bandwidth=1008 * GB,
            intra_node_bytes_per_s=32 * GB,
            inter_node_bytes_per_s=0.3125 * GB,
            pcie_bytes_per_s=32 * GB,
            gpus_per_node=4,
            network=_DESKTOP,
            device_names=("GeForce RTX 4090",),
            source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        ),
        Accelerator(
            name="rtx3090-24g",
            memory_bytes=24 * 2**30,
            bf16_flops=71 * TERA,
            fp32_flops=35.6 * TERA,
            memory_bandwidth=936 * GB,
            intra_node_bytes_per_s=32 * GB,
            inter_node_bytes_per_s=0.3125 * GB,
            pcie_bytes_per_s=32 * GB,
            gpus_per_node=4,
            network=_DESKTOP,
            device_names=("GeForce RTX 3090",),
            source="https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf",
        ),
        Accelerator(
            name="v100-32g",
            memory_bytes=32 * 2**30,
            bf16_flops=125 * TERA,
            fp32_flops=15.7 * TERA,
            memory_bandwidth=900 * GB,
            intra_node_bytes_per_s=150 * GB,
            inter_node_bytes_per_s=6.25 * GB,
            pcie_bytes_per_s=16 * GB,
            has_bf16=False,
            network="four cards of 100 Gb/s for 8 GPUs, as in a DGX-1",
            device_names=("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
            source=_V100,
        ),
        Accelerator(
            name="mi300x-192g",
            memory_bytes=192 * 10**9,
            bf16_flops=1307.4 * TERA,
            fp32_flops=163.4 * TERA,
            memory_bandwidth=5300 * GB,
            intra_node_bytes_per_s=448 * GB,
            inter_node_bytes_per_s=50 * GB,
            pcie_bytes_per_s=64 * GB,
            network="400 Gb/s for each GPU (an assumption)",
            device_names=("AMD Instinct MI300X",),
            source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
        ),
    )
}


def accelerator(name: str) -> Accelerator:
    """The accelerator with a name of the table, such as `h100-80g`; ConfigError with the nearest names for another."""
    found = ACCELERATORS.get(name.lower())
    if found is None:
        nearest = _nearest(name.lower())
        likely = f"nearest: {', '.join(nearest)}; " if nearest else ""
        raise ConfigError(
            f"accelerator `{name}` is not known",
            hint=f"{likely}known: {', '.join(ACCELERATORS)}",
        )
    return found


def _nearest(name: str) -> list[str]:
    """Names that have a name inside, as `h100` or `4090`; where there is none, similar ones."""
    plain = re.sub("[^a-z0-9]|nvidia", "", name).replace("gb", "g")
    having = [known for known in ACCELERATORS if plain and plain in known.replace("-", "")]
    return having or difflib.get_close_matches(name, ACCELERATORS, n=2, cutoff=0.4)


def accelerator_of_device(device_name: str) -> Accelerator:
    """The accelerator whose name the driver reports, as in `NVIDIA H100 80GB HBM3`; ConfigError for another."""
    plain = device_name.removeprefix("NVIDIA ").strip()
    for row in ACCELERATORS.values():
        if plain in row.device_names:
            return row
    raise ConfigError(
        f"accelerator `{device_name}` of this machine is not in the table",
        hint=f"name the one that is most like it by --gpu: {', '.join(ACCELERATORS)}",
    )


def check_precision(row: Accelerator, precision: str) -> None:
    """ConfigError where an accelerator cannot compute in a precision."""
    if precision == "bf16" and not row.has_bf16:
        raise ConfigError(
            f"train.precision bf16 on {row.name}, which has no products in bf16",
            hint="set train.precision to fp16 or fp32, or choose another accelerator",
        )


def machine_of(row: Accelerator, *, gpus_per_node: int | None = None) -> Machine:
    """Nodes of such accelerators, with as many in each as is usual, or as many as given."""
    return Machine(accelerator=row, gpus_per_node=gpus_per_node or row.gpus_per_node)


def with_measured_links(machine: Machine, file: Path) -> Machine:
    """The machine with the rate that `ds-finetune doctor --json` measured, whose output is in `file`.

    The bus bandwidth of its all-reduce over all ranks is that of the slowest link: between nodes where it measured
    several hosts, else within one. It is a rate that collectives reach, so no further share is taken off it.
    ConfigError where the file has none.
    """
    try:
        checks = json.loads(file.read_text(encoding="utf-8"))
        found = _measured_all_reduce(checks)
    except OSError as failed:
        raise ConfigError(
            f"`{file}` cannot be read: {failed.strerror}",
            hint="write it with `ds-finetune doctor RUN.yaml --json > FILE`",
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as wrong:
        raise ConfigError(
            f"`{file}` is not the output of `ds-finetune doctor --json`: {type(wrong).__name__}: {wrong}",
            hint="write it with `ds-finetune doctor RUN.yaml --json > FILE`",
        ) from None
    if found is None:
        raise ConfigError(
            f"`{file}` has no measured all-reduce among its {len(checks)} checks",
            hint="run `ds-finetune doctor RUN.yaml --json` on two or more GPUs, until no check of the network fails",
        )
    rate, ranks, hosts = found
    share = rate / machine.efficiency.link
    if hosts > 1:
        # All ranks of a node share what it sends, and a ring over all ranks passes it through one node's cards.
        row, where = replace(machine.accelerator, inter_node_bytes_per_s=share * hosts / ranks), "between hosts"
    else:
        row, where = replace(machine.accelerator, intra_node_bytes_per_s=share), "within a host"
    note = f"The links {where} are those that doctor measured: {rate / GB:.3g} GB/s bus bandwidth, {ranks:.0f} ranks."
    return replace(machine, accelerator=row, notes=(*machine.notes, note))


def _measured_all_reduce(checks: Iterable[Mapping[str, Any]]) -> tuple[float, float, float] | None:
    """Bytes a second, ranks and hosts."""
    for check in checks:
        values = check.get("values")
        if check["name"] == "all-reduce" and values:
            return float(values["bytes_per_second"]), float(values["ranks"]), float(values["hosts"])
    return None
