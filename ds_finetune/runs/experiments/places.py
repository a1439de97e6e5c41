"""Where runs of an experiment are started: GPUs of this machine, or slots of a hostfile, and by which command."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_finetune.config.hostfile import Host, read_hostfile
from ds_finetune.errors import LaunchError
from ds_finetune.system.info import query_gpus

_PROGRAM = (sys.executable, "-u", "-m", "ds_finetune")
_HERE = "localhost"


@dataclass(frozen=True)
class Place:
    """What one run has for itself: so many ranks, on devices of this machine or of hosts."""

    ranks: int
    devices: tuple[str, ...] = ()
    """GPUs of this machine as CUDA_VISIBLE_DEVICES names them; empty on CPUs and with a hostfile."""
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
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(self.devices)}


def places(*, ranks: int, parallel: int, hostfile: str | None, folder: Path) -> list[Place]:
    """Places of `ranks` ranks each: `parallel` ones of this machine, or all that the slots of `hostfile` make.

    LaunchError where there are too few GPUs or slots. Where a run needs several GPUs of this machine, a hostfile for
    it is written to `folder`, since `launch` chooses devices by a hostfile alone.
    """
    if hostfile is not None:
        return _on_hosts(hostfile, read_hostfile(hostfile), ranks)
    gpus = visible_gpus()
    if not gpus:
        return [Place(ranks)] * parallel
    if parallel * ranks > len(gpus):
        raise LaunchError(
            f"{parallel} runs at once of {ranks} ranks each need {parallel * ranks} GPUs, and {len(gpus)} are visible",
            hint="lower `parallel` or `ranks`, set CUDA_VISIBLE_DEVICES to more GPUs, or give a hostfile",
        )
    groups = [gpus[first : first + ranks] for first in range(0, parallel * ranks, ranks)]
    if ranks == 1:
        return [Place(1, devices=group) for group in groups]
    return _on_this_machine(groups, ranks, folder)


def visible_gpus() -> tuple[str, ...]:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, as it names them; none where runs use the CPU."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return ()
    present = tuple(str(number) for number in range(len(query_gpus())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    named = tuple(word.strip() for word in visible.split(","))
    return () if named in (("",), ("-1",), ("NoDevFiles",)) else named


def _on_this_machine(groups: Sequence[tuple[str, ...]], ranks: int, folder: Path) -> list[Place]:
    """Places of several GPUs each; LaunchError where they are not named by numbers, as `launch` needs them."""
    named = [name for group in groups for name in group]
    if not all(name.isdecimal() for name in named):
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES is `{os.environ['CUDA_VISIBLE_DEVICES']}`, and runs of {ranks} ranks need numbers",
            hint="name the GPUs by their numbers",
        )
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / "hosts"
    own.write_text(f"{_HERE} slots={max(map(int, named)) + 1}\n", encoding="utf-8")
    return [Place(ranks, hostfile=str(own), include=f"{_HERE}:{','.join(group)}") for group in groups]


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
