"""What the launching program tells the agent of a host to run, and how an agent may end."""

from dataclasses import dataclass

DONE, FAILED = "done", "failed"
GRACE_SECONDS = 4.0
"""Time between a rank's first failure and the kill of the others, which meanwhile record what they wait for."""


@dataclass(frozen=True)
class AgentOrder:
    """An order to the agent of a host: which ranks to start, and how."""

    name: str
    """Name of this agent. Names sort in hostfile order; a host that comes back gets a new name."""
    argv: tuple[str, ...]
    """Command of each rank."""
    slots: int
    fewest: int
    most: int
    """Fewest and greatest number of hosts with which the run may restart."""
    restarts: int
    wait_seconds: float
    """How long a restart with too few hosts waits for more."""
    join_seconds: float
    """How long a restart that has enough hosts waits for more."""
    address: str
    """Address of the first host, at which the agents and the ranks meet."""
    port: int
    is_first: bool
    run_id: str
    logs: str
    environ: dict[str, str]
    """Environment variables of the ranks of this host only."""
