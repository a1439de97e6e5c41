"""Accelerators by name, and the machines that a run is planned for: peaks, memory, bandwidths and links, with sources.

Rates are bytes a second in one direction, FLOP/s are of dense products; a datasheet's numbers with sparsity are halved.
"""

import difflib
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from ds_finetune.errors import ConfigError
from ds_finetune.system.whole_file import replace_file

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
    """Share of the peak that large products reach: 798 of 989 TFLOP/s on an H100 (bf16, 8192 by 8192 by 8192)."""
    head: float = 0.80
    """Share of the peak that products reach in a language model's head."""
    grouped: float = 0.55
    """Share of the peak that products of routed experts reach, whose numbers of rows differ."""
    attention: float = 0.55
    """Share of the peak that attention over documents reaches, forward and backward together."""
    memory: float = 0.85
    """Share of the memory's bandwidth: copies reached 3.0 of 3.35 TB/s on an H100, and other kernels reach less."""
    new_memory: float = 1.0
    """Share of that where results are new memory: all of it where an allocator keeps memory, as on GPUs."""
    link: float = 0.75
    """Share of a link's rate that collectives reach, of many megabytes."""
    host_link: float = 0.80
    """Share of PCIe's rate with pinned memory: 50 to 55 of 64 GB/s."""
    hidden: float = 0.80
    """Share of the traffic that may run beside computation which does so at best."""
    launch_seconds: float = 5e-6
    """Time of the host for a kernel, where kernels are shorter than that."""
    token_seconds: float = 20e-6
    """Time of the host for a kernel of a forward of one token a row, in which no long kernel hides Python: an
    assumption.
    """
    message_seconds: float = 20e-6
    """Time of a collective without data."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run is planned for: equal nodes of equal accelerators, or CPU ranks of this machine."""

    accelerator: Accelerator
    gpus_per_node: int
    host_bandwidth: float = 200 * GB
    """Bandwidth of a node's memory, for optimizers in host memory."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    blocks_host: bool = False
    """Whether collectives block the ranks, so that none runs beside computation, as on CPUs."""
    calls_each_document: bool = False
    """Whether attention is called for each document, as on CPUs; on GPUs one call attends within all of a forward."""
    notes: tuple[str, ...] = ()
    """Where rates were measured rather than taken from the table, as sentences."""


_NVIDIA, _CENTER = "https://www.nvidia.com", "https://www.nvidia.com/en-us/data-center"
_A100, _H200 = f"{_CENTER}/a100/", f"{_CENTER}/h200/"
_H100 = "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-datasheet"
_B200 = f"{_CENTER}/hgx/ and {_CENTER}/dgx-b200/"
_L40S, _L4 = f"{_CENTER}/l40s/", f"{_CENTER}/l4/"
_T4 = f"{_CENTER}/tesla-t4/"
_A10G = "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
_RTX4090 = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_RTX3090 = f"{_NVIDIA}/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_MI300X = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
"""Sources."""
_DGX_1 = "four cards of 100 Gb/s for 8 GPUs, as in a DGX-1"
_DGX_A100 = "200 Gb/s for each GPU, as in a DGX A100"
_DGX_H100, _DGX_B200 = (f"400 Gb/s for each GPU, as in a DGX {name}" for name in ("H100", "B200"))
_PCIE = "400 Gb/s for 8 GPUs (an assumption), and only PCIe between the GPUs of a node"
_G6E = "400 Gb/s for 8 GPUs, as in AWS g6e.48xlarge"
_G4, _G5, _G6 = (f"100 Gb/s for 8 GPUs, as in AWS {name}" for name in ("g4dn.metal", "g5.48xlarge", "g6.48xlarge"))
_DESKTOP = "10 Gb/s Ethernet for the node (an assumption: such cards are in workstations)"
_400G = "400 Gb/s for each GPU (an assumption)"
"""Networks."""
_WITHOUT_BF16 = ("v100-32g", "t4-16g")
_GIB, _GB = 2**30, 10**9


def _row(  # noqa: PLR0913 - the columns of the table
    name: str,
    memory_bytes: int,
    teraflops: tuple[float, float],
    gigabytes: tuple[float, float, float, float],
    device_names: str,
    network: str,
    source: str,
) -> Accelerator:
    memory, intra_node, inter_node, pcie = gigabytes
    return Accelerator(
        name=name,
        memory_bytes=memory_bytes,
        bf16_flops=teraflops[0] * TERA,
        fp32_flops=teraflops[1] * TERA,
        memory_bandwidth=memory * GB,
        intra_node_bytes_per_s=intra_node * GB,
        inter_node_bytes_per_s=inter_node * GB,
        pcie_bytes_per_s=pcie * GB,
        gpus_per_node=4 if network == _DESKTOP else 8,
        has_bf16=name not in _WITHOUT_BF16,
        device_names=tuple(device_names.split(", ")),
        network=network,
        source=source,
    )


# Name, memory, TFLOP/s in 16 bits and in fp32, GB/s of the memory, to the node, to other nodes and to the host, names
# that the driver reports, network, source.
_ROWS = (
    _row("a100-40g", 40 * _GIB, (312, 19.5), (1555, 300, 25, 32), "A100-SXM4-40GB, A100-PCIE-40GB", _DGX_A100, _A100),
    _row("a100-80g", 80 * _GIB, (312, 19.5), (2039, 300, 25, 32), "A100-SXM4-80GB", _DGX_A100, _A100),
    _row("h100-80g", 80 * _GIB, (989, 67), (3350, 450, 50, 64), "H100 80GB HBM3, H100 SXM5 80GB", _DGX_H100, _H100),
    _row("h100-pcie-80g", 80 * _GIB, (756, 51), (2000, 64, 6.25, 64), "H100 PCIe", _PCIE, _H100),
    _row("h200-141g", 141 * _GB, (989, 67), (4800, 450, 50, 64), "H200, H200 141GB HBM3e", _DGX_H100, _H200),
    _row("b200-180g", 180 * _GB, (2250, 75), (8000, 900, 50, 64), "B200, B200 180GB HBM3e", _DGX_B200, _B200),
    _row("l40s-48g", 48 * _GB, (362, 91.6), (864, 32, 6.25, 32), "L40S", _G6E, _L40S),
    _row("l4-24g", 24 * _GB, (121, 30.3), (300, 32, 1.5625, 32), "L4", _G6, _L4),
    _row("a10g-24g", 24 * _GB, (70, 35), (600, 32, 1.5625, 32), "A10G", _G5, _A10G),
    _row("rtx4090-24g", 24 * _GIB, (165.2, 82.6), (1008, 32, 0.3125, 32), "GeForce RTX 4090", _DESKTOP, _RTX4090),
    _row("rtx3090-24g", 24 * _GIB, (71, 35.6), (936, 32, 0.3125, 32), "GeForce RTX 3090", _DESKTOP, _RTX3090),
    _row(
        "v100-32g", 32 * _GIB, (125, 15.7), (900, 150, 6.25, 16), "Tesla V100-SXM2-32GB, V100-SXM2-32GB", _DGX_1, _V100
    ),
    _row("t4-16g", 16 * _GB, (65, 8.1), (300, 16, 1.5625, 16), "Tesla T4, T4", _G4, _T4),
    _row("mi300x-192g", 192 * _GB, (1307.4, 163.4), (5300, 448, 50, 64), "AMD Instinct MI300X", _400G, _MI300X),
)
ACCELERATORS: Mapping[str, Accelerator] = {row.name: row for row in _ROWS}


def accelerator(name: str) -> Accelerator:
    """The accelerator with a name of the table, such as `h100-80g`; ConfigError with the nearest names for another."""
    if (found := ACCELERATORS.get(name.lower())) is not None:
        return found
    nearest = _nearest(name.lower())
    likely = f"nearest: {', '.join(nearest)}; " if nearest else ""
    raise ConfigError(f"accelerator `{name}` is not known", hint=f"{likely}known: {', '.join(ACCELERATORS)}")


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
    hint = "write it with `ds-finetune doctor RUN.yaml --json > FILE`"
    try:
        checks = json.loads(file.read_text(encoding="utf-8"))
        found = _measured_all_reduce(checks)
    except OSError as failed:
        raise ConfigError(f"`{file}` cannot be read: {failed.strerror}", hint=hint) from None
    except (ValueError, TypeError, KeyError, AttributeError) as wrong:
        raise ConfigError(
            f"`{file}` is not the output of `ds-finetune doctor --json`: {type(wrong).__name__}: {wrong}", hint=hint
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


_BUSY = (
    "The machine was busy when the rates of its ranks were measured: other processes took {:.0%} of its processors, so "
    "times are too long. `ds-finetune plan --gpu cpu` measures again."
)
_PYTHON = 20
"""How many times as long as an operator on a few numbers one of a forward of one token a row takes, with the Python
around it: 14 to 35 in three tiny models.
"""
_MOST_OF_OTHERS = 0.1
"""Share of the processors."""


@dataclass(frozen=True)
class CpuRates:
    """What one of several ranks reaches while all of them are busy, in FLOP/s, bytes a second and seconds."""

    matmul: float
    """Products in the precision of the run, 1,024 rows."""
    head: float
    """Products of a language model's head and its gradients, 1,024 rows; of another library than the others on some
    CPUs.
    """
    grouped: float
    """Products of an expert's 128 rows and their gradients."""
    attention: float
    """Causal attention of 512 tokens, forward and backward."""
    memory: float
    """Bytes read and written by copies beyond the caches."""
    new_memory: float
    """Bytes read and written by an operator whose result is new memory."""
    kernel_seconds: float
    """Time of an operator on a few numbers, with its share of autograd."""
    link: float
    """Bytes that a rank sends to others of its machine."""
    message_seconds: float
    """Time of a collective on a few numbers."""
    others: float
    """Share of the machine's processors that other processes took meanwhile."""

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes took so much that the rates are too low."""
        return self.others > _MOST_OF_OTHERS

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """The rates in a file; None where there is none, or one of another version."""
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, file: Path) -> None:
        """Write them to a file, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(asdict(self)))


def rates_file(ranks: int, *, precision: str, threads: int) -> Path:
    """Where the rates of this machine are kept, by what changes them."""
    kind = (platform.node(), platform.processor(), platform.version(), os.cpu_count(), ranks, precision, threads)
    key = hashlib.sha256(repr(kind).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "ds_finetune" / "cpu_rates" / f"{key}.json"


def cpu_machine(rates: CpuRates, *, ranks: int, memory_bytes: int) -> Machine:
    """`ranks` ranks of one host, which share its memory. All rates are reached ones, so that shares of peaks are 1."""
    row = Accelerator(
        name="a rank of this machine's CPUs",
        memory_bytes=memory_bytes // ranks,
        bf16_flops=rates.matmul,
        fp32_flops=rates.matmul,
        memory_bandwidth=rates.memory,
        intra_node_bytes_per_s=rates.link,
        inter_node_bytes_per_s=rates.link,
        pcie_bytes_per_s=rates.memory / 2,
        gpus_per_node=ranks,
        network="measured with gloo",
        source="measured on this machine",
    )
    efficiency = Efficiency(
        matmul=1.0,
        head=rates.head / rates.matmul,
        grouped=rates.grouped / rates.matmul,
        attention=rates.attention / rates.matmul,
        memory=1.0,
        new_memory=rates.new_memory / rates.memory,
        link=1.0,
        host_link=1.0,
        hidden=0.0,
        launch_seconds=rates.kernel_seconds,
        token_seconds=_PYTHON * rates.kernel_seconds,
        message_seconds=rates.message_seconds,
    )
    return Machine(
        accelerator=row,
        gpus_per_node=ranks,
        host_bandwidth=ranks * rates.memory,
        efficiency=efficiency,
        blocks_host=True,
        calls_each_document=True,
        notes=(_BUSY.format(rates.others),) if rates.is_disturbed else (),
    )
