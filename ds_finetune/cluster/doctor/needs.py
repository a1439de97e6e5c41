"""What a run needs of its hosts: plan, operators, disk, memory, folders and files; `doctor --simulate` shows it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_finetune.cluster.host_checks import Check, State, groups_of, label, ranks_of, world_of
from ds_finetune.config.hostfile import Host
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.config.units import GIB
from ds_finetune.errors import FinetuneError
from ds_finetune.plan.mesh import Mesh
from ds_finetune.system.versions import check_versions
from ds_finetune.system.world import World

if TYPE_CHECKING:
    from ds_finetune.trainer.resolve import ResolvedRun

_LAUNCHER = "the doctor"
_EVERY_LAYER = ("tp", "sp")
"""Axes whose ranks exchange activations in every layer."""


@dataclass(frozen=True)
class Need:
    """The needs of a run: bytes of each rank in host memory and on its GPU, bytes that each host writes, operators."""

    rank_bytes: int
    gpu_bytes: int
    disk_bytes: Mapping[str, int]
    ops: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckedRun:
    """What the doctor needs of a run file."""

    output_dir: str
    cache_dir: str
    inputs: tuple[Path, ...]
    """What the run file names to be read; it may be an id of the Hugging Face hub."""
    node_local: bool | None
    """Whether each host has the checkpoints of its own ranks; None where nothing is saved."""
    parallel: ParallelConfig
    resolve: Callable[[World, str], "ResolvedRun"]
    """Resolves the run on the ranks of a world and a kind of device; FinetuneError where it cannot be trained so."""

    @property
    def folders(self) -> dict[str, str]:
        """Folders that hosts may share, by the key of the run file."""
        return {"output_dir": self.output_dir, "data.cache_dir": self.cache_dir}

    @property
    def files(self) -> tuple[str, ...]:
        """Files and folders that every host must have."""
        return tuple(str(path) for path in self.inputs if path.exists())


def need_of(checked: CheckedRun, hosts: Sequence[Host], device: str) -> tuple[Need | None, Check]:
    """What a run needs, and the check of its plan; None where the plan is refused."""
    try:
        check_versions()
        from transformers.utils import logging

        from ds_finetune.engine.ops.deepspeed_ops import needed_ops

        logging.set_verbosity_error()
        run = checked.resolve(world_of(hosts, _LAUNCHER), device)
        estimate, plan = run.estimate, run.plan
        disks = {
            label(host): estimate.disk(ranks=host.slots, is_first_host=number == 0).num_bytes
            for number, host in enumerate(hosts)
        }
        need = Need(estimate.host_bytes, estimate.gpu_bytes, disks, needed_ops(plan))
    except FinetuneError as refused:
        return None, Check("plan", "", "fail", refused.message, refused.hint)
    found = f"{plan.mesh}, ZeRO-{plan.zero_stage}, {plan.world.world_size} ranks on {device}"
    return need, Check("plan", "", "ok", found)


def simulate(hosts: Sequence[Host], run: CheckedRun | None) -> list[Check]:
    """The checks of a run on `hosts` with GPUs, without contacting any; without a run only the ranks."""
    fewest_slots, most_slots = min(host.slots for host in hosts), max(host.slots for host in hosts)
    checks = [Check("hosts", "", "ok", f"{sum(host.slots for host in hosts)} ranks on {len(hosts)} hosts")]
    if fewest_slots < most_slots:
        few = [label(host) for host in hosts if host.slots < most_slots]
        found = f"{', '.join(few[:8])} with fewer slots than {most_slots}"
        hint = "all ranks do the same work; leave it where this is intended"
        checks.append(Check("hosts", "", "warn", found, hint))
    for host, ranks in zip(hosts, ranks_of(hosts), strict=True):
        checks.append(Check("ranks", label(host), "ok", f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"))
    if run is None:
        return checks
    need, planned = need_of(run, hosts, "cuda")
    checks.append(planned)
    if need is not None:
        most = max(need.disk_bytes.values())
        found = (
            f"a rank needs {need.gpu_bytes / GIB:,.1f} GiB on its GPU and {need.rank_bytes / GIB:,.1f} GiB in "
            "memory, without activations"
        )
        checks.append(Check("memory", "", "ok", found))
        checks.append(Check("disk", "", "ok", f"output_dir needs {most / GIB:,.1f} GiB at most"))
    try:
        mesh = Mesh.of(run.parallel, world_size=sum(host.slots for host in hosts), rank=0)
    except FinetuneError:
        return checks
    return [*checks, *group_checks(mesh, hosts)]


def group_checks(mesh: Mesh, hosts: Sequence[Host]) -> Iterator[Check]:
    """For each parallel axis, the number of hosts that its most spread group of ranks spans."""
    host_of_rank = [number for number, host in enumerate(hosts) for _ in range(host.slots)]
    for axis, lines in groups_of(mesh, ("tp", "sp", "pp", "dp")).items():
        widest = max(lines, key=lambda line: len({host_of_rank[rank] for rank in line}))
        span = len({host_of_rank[rank] for rank in widest})
        is_slow = span > 1 and axis in _EVERY_LAYER
        state: State = "warn" if is_slow else "ok"
        spread = f"lie on {span} hosts, e.g. ranks {', '.join(map(str, widest[:8]))}"
        where = "stay within a host" if span == 1 else spread
        hint = f"set parallel.{axis} to a divisor of every host's slots" if is_slow else ""
        yield Check("groups", "", state, f"{len(lines)} groups of {axis} {len(widest)} {where}", hint)
