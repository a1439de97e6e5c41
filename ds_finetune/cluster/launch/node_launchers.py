"""Commands of node launchers. A node launcher starts and watches the ranks of one host.

There are two: torchrun's elastic agent and DeepSpeed's launcher.
"""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_finetune.config.hostfile import Host

ENTRY_MODULE = "ds_finetune.cluster.worker"
"""Module that every rank runs, under every launcher."""


@dataclass(frozen=True)
class Rendezvous:
    """Address and port of rank 0, all hosts, and the index of one host among them."""

    hosts: tuple[Host, ...]
    index: int
    address: str
    port: int | str


NodeLauncher = Callable[[Rendezvous, Sequence[str], str], list[str]]


def torchrun(rendezvous: Rendezvous, arguments: Sequence[str], python: str) -> list[str]:
    """torchrun with a fixed node rank for each host, so that ranks follow the hostfile, and without restarts.

    Restarts by torchrun need a store on one of the hosts, and fail when that host is lost. Therefore the launching
    program restarts the run, with new node launchers on the remaining hosts.
    """
    options = [
        "--nnodes",
        len(rendezvous.hosts),
        "--node-rank",
        rendezvous.index,
        "--nproc-per-node",
        rendezvous.hosts[rendezvous.index].slots,
    ]
    options += ["--master-addr", rendezvous.address, "--master-port", rendezvous.port, "--max-restarts", 0]
    return [python, "-u", "-m", "torch.distributed.run", *map(str, options), "-m", ENTRY_MODULE, *arguments]


def deepspeed(rendezvous: Rendezvous, arguments: Sequence[str], python: str) -> list[str]:
    """DeepSpeed's node launcher (0.19.8, launcher/launch.py), as its runner starts it on each host."""
    ranks = {
        f"{number}-{host.name}": list(host.devices or range(host.slots)) for number, host in enumerate(rendezvous.hosts)
    }
    world_info = base64.urlsafe_b64encode(json.dumps(ranks).encode()).decode()
    options = [
        f"--world_info={world_info}",
        f"--node_rank={rendezvous.index}",
        f"--master_addr={rendezvous.address}",
        f"--master_port={rendezvous.port}",
    ]
    return [
        python,
        "-u",
        "-m",
        "deepspeed.launcher.launch",
        *options,
        "--no_local_rank",
        "--module",
        ENTRY_MODULE,
        *arguments,
    ]


NODE_LAUNCHERS: dict[str, NodeLauncher] = {"torchrun": torchrun, "deepspeed": deepspeed}
"""Node launchers by the value of `--launcher`."""
