"""Messages between a rank's monitor and the coordinator on rank zero."""

from dataclasses import dataclass

from ds_finetune.cluster.watchdog.progress import RankStatus
from ds_finetune.cluster.watchdog.report import FailureReport, RankProcess, RunEnding
from ds_finetune.system.process_messages import ProcessMessage


@dataclass(frozen=True)
class CoordinatorLocation(ProcessMessage, kind="coordinator"):
    """The coordinator's address and process, kept in the store; an empty `address` stands for MASTER_ADDR."""

    address: str
    port: int
    process: RankProcess


@dataclass(frozen=True)
class RankAccepted(ProcessMessage, kind="accepted"):
    """The coordinator's answer to the `RankProcess` of a rank that it accepts."""


@dataclass(frozen=True)
class RankRefused(ProcessMessage, kind="refused"):
    """The coordinator's answer to a rank that it does not accept, with the reason."""

    why: str


@dataclass(frozen=True)
class StatusRequest(ProcessMessage, kind="status_request"):
    """The coordinator asks every rank for a `RankStatus`, because one has hung or failed."""


@dataclass(frozen=True)
class MoreTime(ProcessMessage, kind="more_time"):
    """The coordinator waits longer for answers than usual, because packets are lost."""


@dataclass(frozen=True)
class HangReport(ProcessMessage, kind="hang"):
    """A rank has made no progress within its limit; `why` is a line for the report."""

    why: str


@dataclass(frozen=True)
class RankLeaving(ProcessMessage, kind="leaving"):
    """A rank is about to end its process for the reason `why`; this ends the run."""

    why: str


@dataclass(frozen=True)
class RankGoodbye(ProcessMessage, kind="goodbye"):
    """A rank has finished without an error."""


FROM_RANK: tuple[type[ProcessMessage], ...] = (
    RankProcess,
    RankStatus,
    FailureReport,
    HangReport,
    RankLeaving,
    RankGoodbye,
)
FROM_COORDINATOR: tuple[type[ProcessMessage], ...] = (RankAccepted, RankRefused, StatusRequest, MoreTime, RunEnding)
