"""The CPU ranks of this machine as a machine that runs are planned for, from rates that reference/bench/cpu_rates.py
measured.
"""

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from ds_finetune.plan.estimate.accelerators import Accelerator, Efficiency, Machine
from ds_finetune.system.whole_file import replace_file

_BUSY = (
    "The machine was busy when the rates of its ranks were measured: other processes took {:.0%} of its processors, so "
    "times are too long. `ds-finetune plan --gpu cpu` measures again."
)
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
    """The same of an operator whose result is new memory."""
    kernel_seconds: float
    """Of an operator on a few numbers, with its share of autograd."""
    link: float
    """Bytes that a rank sends to others of its machine."""
    message_seconds: float
    """Of a collective on a few numbers."""
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
