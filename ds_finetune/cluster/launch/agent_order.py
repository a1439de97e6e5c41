"""What the launching program tells the agent of a host to run, and how an agent may end."""

from dataclasses import dataclass
from typing import Any

DONE, FAILED = "done", "failed"
GRACE_SECONDS = 4.0
"""Time between a rank's first failure and the kill of the others, which meanwhile record what they wait for."""


@dataclass(frozen=True)
class AgentOrder:
    """An order to the agent of a host: which ranks to start, and how."""

    logs: str
    """Folder of the logs of the run's ranks."""
    environ: dict[str, str]
    """Environment variables of the ranks of this host only."""
    rendezvous: dict[str, Any]
    """Arguments of torch's RendezvousParameters. `local_addr` is this agent's name; names sort in hostfile order."""
    workers: dict[str, Any]
    """Arguments of torch's WorkerSpec. `master_addr` is the address of the first host, where agents and ranks meet."""
