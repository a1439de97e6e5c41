"""Where runs of an experiment are started: GPUs of this machine, or slots of a hostfile, and by which command."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_finetune.errors import LaunchError
from ds_finetune.hostfile import Host, read_hostfile
from ds_finetune.hosts.info import query_gpus

_PROGRAM = (sys.executable, "-u", "-m", "ds_finetune")
_HERE = "localhost"


@dataclass(frozen=True)
class Place:
    """What one run has for itself: so many ranks, on devices of this machine or of hosts."""

    ranks: int
    devices: tuple[int, ...] = ()
    """GPUs of this machine; empty on CPUs and with a hostfile."""
    hostfile: str = ""
    include: str = ""
    """The slots of `hostfile`, as `ds-finetune launch --include` takes them."""

    def command(self, run_file: Path) -> list[str]:
        """The words that start `run_file` here: `train` for one rank of this machine, `launch` for all else."""
        if self.hostfile:
            return [*_PROGRAM, "launch", str(run_file), "--hostfile", self.hostfile, "--include", self.include]
        if self.ranks == 1:
            return [*_PROGRAM, "train", str(run_file)]
        return [*_PROGRAM, "launch", str(run_file), "--nproc", str(self.ranks)]

    def environment(self) -> dict[str, str]:
        """The environment of that command."""
        if not self.devices:
            return dict(os.environ)
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices))}


def places(*, ranks: int, parallel: int, hostfile: str | None, folder: Path) -> list[Place]:
    """Places of `ranks` ranks each: `parallel` ones of this machine, or all that the slots of `hostfile` make.

    LaunchError where there are too few GPUs or slots. Where a run needs several GPUs of this machine, a hostfile for
    it is written to `folder`, since `launch` chooses devices by a hostfile alone.
    """
    if hostfile is not None:
        return _on_hosts(hostfile, read_hostfile(hostfile), ranks)
    gpus = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else len(query_gpus())
    if not gpus:
        return [Place(ranks)] * parallel
    if parallel * ranks > gpus:
        raise LaunchError(
            f"{parallel} runs at once of {ranks} ranks each need {parallel * ranks} GPUs, and this machine has {gpus}",
            hint="lower `parallel` or `ranks`, or give a hostfile",
        )
    if ranks == 1:
        return [Place(1, devices=(number,)) for number in range(parallel)]
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / "hosts"
    own.write_text(f"{_HERE} slots={gpus}\n", encoding="utf-8")
    return _on_hosts(str(own), (Host(_HERE, gpus, 1),), ranks)[:parallel]


def _on_hosts(hostfile: str, hosts: Sequence[Host], ranks: int) -> list[Place]:
    """The slots of hosts in groups of `ranks`: within one host where it has enough of them, else of whole hosts."""
    most = max(host.slots for host in hosts)
    groups = _within_hosts(hosts, ranks) if ranks <= most else _whole_hosts(hosts, ranks)
    if not groups:
        raise LaunchError(
            f"{hostfile} has {sum(host.slots for host in hosts)} slots on {len(hosts)} hosts, and no group of whole "
            f"hosts has the {ranks} ranks of a run",
            hint="choose `ranks` so that it is at most the slots of a host, or the slots of several whole hosts",
        )
    return [Place(ranks, hostfile=hostfile, include=include) for include in groups]


def _within_hosts(hosts: Sequence[Host], ranks: int) -> list[str]:
    return [
        f"{host.name}:{','.join(map(str, range(first, first + ranks)))}"
        for host in hosts
        for first in range(0, host.slots - ranks + 1, ranks)
    ]


def _whole_hosts(hosts: Sequence[Host], ranks: int) -> list[str]:
    groups: list[str] = []
    names: list[str] = []
    slots = 0
    for host in hosts:
        names, slots = [*names, host.name], slots + host.slots
        if slots > ranks:
            names, slots = [host.name], host.slots
        if slots == ranks:
            groups.append("@".join(names))
            names, slots = [], 0
    return groups
