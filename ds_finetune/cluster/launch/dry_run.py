"""What `launch --dry-run` prints: the commands, and the host, devices and parallel groups of each rank."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ds_finetune.cluster.launch.environment import redacted
from ds_finetune.cluster.launch.schedulers import (
    Job,
    deepspeed_command,
    mpirun_command,
    srun_command,
    torchrun_commands,
)
from ds_finetune.config.hostfile import Host
from ds_finetune.plan.mesh import Axis, Mesh

_COMMANDS = 2
"""Commands per host that are printed from the start of the list, and from its end."""
_AXES: tuple[Axis, ...] = ("pp", "sp", "tp")


def dry_run_lines(
    job: Job, launcher: str, *, hostfile: str = "hosts", environ: Mapping[str, str], ssh_args: Sequence[str] = ()
) -> list[str]:
    """Lines with the number of ranks, the address where they meet, and the commands.

    For mpirun and slurm this is the command that `launch` runs; for the others it is what a person would type.
    `environ` has the variables of this process, which describe Slurm's allocation.
    """
    where = f"{job.master_addr}:{job.master_port}" if job.master_addr else "the first node of the allocation"
    head = [
        f"run {job.run_id}: {job.world_size or 'all'} ranks on {len(job.hosts) or 'all'} hosts by {launcher}, rank "
        f"0 at {where}"
    ]
    head += [f"network interface {job.interface} on every host"] if job.interface else []
    if launcher == "mpirun":
        return [*head, _typed(mpirun_command(job, ssh_args))]
    if launcher == "slurm":
        return [*head, _typed(srun_command(job, environ))]
    if launcher == "deepspeed":
        return [*head, f"as if typed: {_typed(deepspeed_command(job, hostfile))}"]
    lines = [
        f"as if typed on {host.name}: {_typed(argv)}"
        for host, argv in zip(job.hosts, torchrun_commands(job), strict=True)
    ]
    left = len(lines) - 2 * _COMMANDS
    return [
        *head,
        *(lines if left <= 0 else [*lines[:_COMMANDS], f"... and on {left} more hosts", *lines[-_COMMANDS:]]),
    ]


def rank_map(hosts: Sequence[Host], mesh: Mesh) -> list[str]:
    """A line for each host with its ranks, its devices and their indices on the axes of `mesh`.

    Then a line for each axis with the number of groups that cross hosts. Axes of length one are left out.
    """
    assert mesh.world_size == sum(host.slots for host in hosts)
    width = max(len(host.name) for host in hosts)
    lines, first = [], 0
    host_of_rank: list[int] = []
    for number, host in enumerate(hosts):
        ranks = range(first, first + host.slots)
        devices = host.devices or range(host.slots)
        indices = _axis_indices(mesh, ranks)
        lines.append(f"{host.name:{width}}  ranks {_spans(ranks)}  devices {_spans(devices)}  {indices}".rstrip())
        host_of_rank += [number] * host.slots
        first += host.slots
    groups = {axis: mesh.lines(axis) for axis in _AXES if getattr(mesh, axis) > 1} | (
        {"ep": mesh.expert_lines()} if mesh.ep > 1 else {}
    )
    for axis, found in groups.items():
        across = sum(len({host_of_rank[rank] for rank in line}) > 1 for line in found)
        lines.append(
            f"{axis}: {len(found)} groups of {len(found[0])}, "
            f"{f'{across} of them across hosts' if across else 'each within a host'}"
        )
    return lines


def _typed(argv: Sequence[str]) -> str:
    return shlex.join(redacted(argv))


def _axis_indices(mesh: Mesh, ranks: Sequence[int]) -> str:
    """The indices of some ranks on each axis, as `dp 0-1  tp 0-3`."""
    axes: tuple[Axis, ...] = ("pp", "dp", "sp", "tp")
    found = [
        f"{axis} {_spans(sorted({mesh.place(axis, rank) for rank in ranks}))}"
        for axis in axes
        if getattr(mesh, axis) > 1
    ]
    experts = sorted({replace(mesh, rank=rank).expert_place for rank in ranks})
    return "  ".join(found + ([f"ep {_spans(experts)}"] if mesh.ep > 1 else []))


def _spans(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> `0-2,5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
