"""The messages of a launch: between the launching program and its supervisors, and from a rank to its supervisor."""

from ds_finetune.system.info import HostInfo
from ds_finetune.system.process_messages import ProcessMessage


class Heartbeat(ProcessMessage, kind="heartbeat"):
    """A sign of life, in both directions between the launching program and a supervisor."""


class StartRanks(ProcessMessage, kind="start"):
    """Order to a supervisor: start the ranks of its host."""

    argv: list[str]
    """Command of the node launcher."""
    env: dict[str, str]
    """Variables that every rank gets."""
    unset: list[str]
    """Variables removed from the environment of every rank, even if the login shell has set them."""
    tag: str
    """Process tag of the attempt on this host."""
    earlier_tags: list[str]
    """Tags of earlier attempts, whose remaining processes are killed first."""
    logs: str
    """Folder of the ranks' output."""
    watchdog: str
    """Folder in which the run's watchdogs record why they killed a process."""
    silent_seconds: float
    """Seconds without a message from the launching program after which the supervisor kills its ranks."""
    meeting_address: str
    """Address of rank 0, from which the supervisor finds the network interface; empty for one host."""


class SaveAndStop(ProcessMessage, kind="save-and-stop"):
    """Order to a supervisor: send SIGTERM to its ranks, so that they save a checkpoint and exit."""


class KillRanks(ProcessMessage, kind="kill"):
    """Order to a supervisor: kill every process of the attempt on its host."""


class HostReady(ProcessMessage, kind="ready"):
    """The first message of a supervisor: the facts of its host."""

    info: HostInfo


class RanksStarted(ProcessMessage, kind="started"):
    """The supervisor has started the node launcher."""

    interface: str
    """Network interface of the ranks; empty where none was chosen."""


class RankZeroOutput(ProcessMessage, kind="output"):
    """A line that rank 0 printed."""

    text: str


class RankEnded(ProcessMessage, kind="rank-ended"):
    """A rank's process ended."""

    rank: int
    pid: int
    code: int | None
    """None where the rank ended without reporting an exit code, for example killed by a signal."""
    tail: list[str]
    """Last lines of its output; empty where it succeeded."""
    reason: str
    """Why the rank ended without an exit code; empty where the host does not know."""
    cause: str = ""
    """Why the run ended, where the rank ended because of it and has recorded it."""


class ExitCodeReported(ProcessMessage, kind="exit-code"):
    """The node launcher reported how a rank ended."""

    pid: int
    """0 where the node launcher does not name the process."""
    code: int
    """Negative for a signal."""


class HostDone(ProcessMessage, kind="done"):
    """The last message of a supervisor."""

    launcher_code: int
    launcher_tail: list[str]
    """Last lines that the node launcher printed."""
    num_remaining: int
    """Processes that did not end although they were killed."""


class LeftoversKilled(ProcessMessage, kind="leftovers"):
    """Reply of `supervisor kill TAG`."""

    num_remaining: int


class RankConnected(ProcessMessage, kind="rank"):
    """The first message of a rank's control connection, which closes when the rank ends."""

    rank: int
    pid: int


class RankOutput(ProcessMessage, kind="rank-output"):
    """The first line of a rank's output connection; all further lines are the rank's output."""

    rank: int


class RankExit(ProcessMessage, kind="rank-exit"):
    """The exit code of a rank, over its control connection."""

    code: int


FROM_LAUNCHER: tuple[type[ProcessMessage], ...] = (StartRanks, Heartbeat, SaveAndStop, KillRanks)
"""Messages that a supervisor accepts on standard input."""
FROM_SUPERVISOR: tuple[type[ProcessMessage], ...] = (
    HostReady,
    Heartbeat,
    RanksStarted,
    RankZeroOutput,
    RankEnded,
    ExitCodeReported,
    HostDone,
)
"""Messages that the launching program accepts from a supervisor."""
