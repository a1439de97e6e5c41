"""The programs that start and mind the ranks of one host: torchrun's elastic agent and DeepSpeed's node launcher."""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_finetune.hostfile import Host

ENTRY = "ds_finetune.worker"
"""Module that is a rank, under every launcher."""


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks meet, and which of the hosts this one is."""

    hosts: tuple[Host, ...]
    index: int
    address: str
    port: int | str


NodeLauncher = Callable[[Rendezvous, Sequence[str], str], list[str]]


def torchrun(meeting: Rendezvous, arguments: Sequence[str], python: str) -> list[str]:
    """torchrun with a fixed place for each host, so that ranks follow the hostfile; it starts nothing again by itself.

    Its own restarts meet at a store on one of the hosts, and are over when that host is lost; the launching program
    decides instead, with new agents on the hosts that are left.
    """
    where = [
        "--nnodes",
        len(meeting.hosts),
        "--node-rank",
        meeting.index,
        "--nproc-per-node",
        meeting.hosts[meeting.index].slots,
    ]
    where += ["--master-addr", meeting.address, "--master-port", meeting.port, "--max-restarts", 0]
    return [python, "-u", "-m", "torch.distributed.run", *map(str, where), "-m", ENTRY, *arguments]


def deepspeed(meeting: Rendezvous, arguments: Sequence[str], python: str) -> list[str]:
    """DeepSpeed's node launcher (0.19.8, launcher/launch.py), as its runner starts it on each host."""
    ranks = {
        f"{number}-{host.name}": list(host.devices or range(host.slots)) for number, host in enumerate(meeting.hosts)
    }
    known = base64.urlsafe_b64encode(json.dumps(ranks).encode()).decode()
    where = [
        f"--world_info={known}",
        f"--node_rank={meeting.index}",
        f"--master_addr={meeting.address}",
        f"--master_port={meeting.port}",
    ]
    return [python, "-u", "-m", "deepspeed.launcher.launch", *where, "--no_local_rank", "--module", ENTRY, *arguments]


NODE_LAUNCHERS: dict[str, NodeLauncher] = {"torchrun": torchrun, "deepspeed": deepspeed}
"""By the name of `--launcher`."""
