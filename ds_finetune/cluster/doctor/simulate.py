"""`doctor --simulate`: computes the plan of a run, the ranks of each host, and the groups that cross hosts."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from ds_finetune.cluster.doctor.need import need_of, plan_of
from ds_finetune.cluster.hosts.check_result import Check, State, label
from ds_finetune.config.hostfile import Host
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.units import GIB
from ds_finetune.errors import FinetuneError
from ds_finetune.plan.mesh import Mesh

_EVERY_LAYER = ("tp", "sp")
"""Axes whose ranks exchange activations in every layer."""


def simulate(hosts: Sequence[Host], config: RunConfig | None) -> list[Check]:
    """The checks of `config` on `hosts` with GPUs, without contacting any; without a config only the ranks."""
    counts = sorted({host.slots for host in hosts})
    world = sum(host.slots for host in hosts)
    checks = [Check("hosts", "", "ok", f"{world} ranks on {len(hosts)} hosts"), *_unequal(hosts, counts)]
    checks += [
        Check("ranks", label(host), "ok", _ranks(ranks)) for host, ranks in zip(hosts, ranks_of(hosts), strict=True)
    ]
    if config is None:
        return checks
    need, planned = need_of(config, hosts, "cuda")
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
        mesh = plan_of(config, hosts, "cuda").mesh
    except FinetuneError:
        return checks
    return [*checks, *group_checks(mesh, hosts)]


def ranks_of(hosts: Sequence[Host]) -> list[range]:
    """Ranks of each host, numbered in the order of the hostfile as every launcher does."""
    ends = list(accumulate(host.slots for host in hosts))
    return [range(end - host.slots, end) for host, end in zip(hosts, ends, strict=True)]


def group_checks(mesh: Mesh, hosts: Sequence[Host]) -> Iterator[Check]:
    """For each parallel axis, the number of hosts that its most spread group of ranks spans."""
    host_of_rank = [number for number, ranks in enumerate(ranks_of(hosts)) for _ in ranks]
    groups = {axis: mesh.lines(axis) for axis in ("tp", "sp", "pp", "dp") if getattr(mesh, axis) > 1}  # type: ignore[arg-type]
    groups |= {"ep": mesh.expert_lines()} if mesh.ep > 1 else {}
    for axis, lines in groups.items():
        widest = max(lines, key=lambda line: len({host_of_rank[rank] for rank in line}))
        span = len({host_of_rank[rank] for rank in widest})
        is_slow = span > 1 and axis in _EVERY_LAYER
        state: State = "warn" if is_slow else "ok"
        where = (
            "stay within a host" if span == 1 else f"lie on {span} hosts, e.g. ranks {', '.join(map(str, widest[:8]))}"
        )
        hint = f"set parallel.{axis} to a divisor of every host's slots" if is_slow else ""
        yield Check("groups", "", state, f"{len(lines)} groups of {axis} {len(widest)} {where}", hint)


def _unequal(hosts: Sequence[Host], counts: Sequence[int]) -> Iterator[Check]:
    if len(counts) > 1:
        few = [label(host) for host in hosts if host.slots < counts[-1]]
        found = f"{', '.join(few[:8])} with fewer slots than {counts[-1]}"
        yield Check("hosts", "", "warn", found, "all ranks do the same work; leave it where this is intended")


def _ranks(ranks: range) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
