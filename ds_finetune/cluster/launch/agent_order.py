"""What the launching program asks of the agent of a host, and how the agent may end."""

from dataclasses import dataclass

DONE, FAILED = "done", "failed"
GRACE_SECONDS = 4.0
"""Time between the first failure of a rank and the kill of the others, which meanwhile record what they wait for."""


@dataclass(frozen=True)
class AgentOrder:
    """What the agent of a host starts."""

    name: str
    """Name of this agent. The order of the names is that of the hostfile; a host that comes back has another."""
    argv: tuple[str, ...]
    """Command of each rank."""
    slots: int
    fewest: int
    most: int
    """Numbers of hosts with which the run may start again."""
    restarts: int
    wait_seconds: float
    """How long a restart waits for hosts where there are too few."""
    join_seconds: float
    """How long it waits for more hosts where there are enough."""
    address: str
    """Address of the first host, at which the agents and the ranks meet."""
    port: int
    is_first: bool
    run_id: str
    logs: str
    watchdog: str
    """Folder in which the run's watchdogs record why they killed a process."""
    environ: dict[str, str]
    """Variables of the ranks of this host only."""
