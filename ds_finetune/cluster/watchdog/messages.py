"""Messages between a rank's monitor and the coordinator on rank zero."""

import traceback
from typing import Self

import torch.distributed as dist

from ds_finetune.cluster.watchdog.progress import RankStatus
from ds_finetune.errors import RUN_ERROR_EXIT_CODE, FinetuneError
from ds_finetune.system.process_messages import ProcessMessage

_MAX_LINES = 50
_MAX_TEXT_CHARACTERS, _MAX_LINE_CHARACTERS = 200_000, 2_000
_PEER_LOST_WORDS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "TCPStore")
"""Words in errors that torch raises when another rank has exited (torch 2.13: RuntimeError from gloo, DistBackendError
from NCCL).
"""


class RankProcess(ProcessMessage, kind="hello"):
    """The first message of a connection: which rank's process opened it.

    `began` is the kernel's start time of the process. Its process id is valid in `pid_namespace` (stacks.py).
    """

    rank: int
    host: str
    pid: int
    began: str
    pid_namespace: str

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


class FailureReport(ProcessMessage, kind="failed"):
    """An error of a rank: one `line` about it, the last lines of its traceback as `text`, and the exit code.

    `is_secondary` is true where the error may only be a consequence of another rank's exit.
    """

    line: str
    text: str
    code: int
    is_secondary: bool

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The report of `error`."""
        is_framework_error = isinstance(error, FinetuneError)
        lines = (str(error) if is_framework_error else "".join(traceback.format_exception(error))).splitlines()
        code = error.exit_code if isinstance(error, FinetuneError) else RUN_ERROR_EXIT_CODE
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        text = "\n".join(lines[-_MAX_LINES:])[-_MAX_TEXT_CHARACTERS:]
        return cls(f"{type(error).__name__}: {line[:_MAX_LINE_CHARACTERS]}", text, code, is_secondary(error))


class RunEnding(ProcessMessage, kind="end"):
    """Why a run ends: the ranks at fault, the reason in one line, the report, and the exit code.

    `reporter` is the rank that prints the report. `killers` maps ranks to the hung processes on their machine that they
    must kill, as process ids and start times. `is_hang` is true where a hang ended the run.
    """

    at_fault: tuple[int, ...]
    line: str
    report: str
    code: int
    reporter: int
    is_hang: bool
    killers: dict[str, list[tuple[int, str]]]


def is_secondary(error: BaseException) -> bool:
    """Whether torch raises `error` on a rank when another rank has exited, so that the cause may be there."""
    if isinstance(error, FinetuneError):
        return False
    names_peer = isinstance(error, RuntimeError) and any(word in str(error) for word in _PEER_LOST_WORDS)
    return isinstance(error, dist.DistError) or names_peer


class CoordinatorLocation(ProcessMessage, kind="coordinator"):
    """The coordinator's address and process, kept in the store; an empty `address` stands for MASTER_ADDR."""

    address: str
    port: int
    process: RankProcess


class RankAccepted(ProcessMessage, kind="accepted"):
    """The coordinator's answer to the `RankProcess` of a rank that it accepts."""


class RankRefused(ProcessMessage, kind="refused"):
    """The coordinator's answer to a rank that it does not accept, with the reason."""

    why: str


class StatusRequest(ProcessMessage, kind="status_request"):
    """The coordinator asks every rank for a `RankStatus`, because one has hung or failed."""


class HangReport(ProcessMessage, kind="hang"):
    """A rank has made no progress within its limit; `why` is a line for the report."""

    why: str


class RankLeaving(ProcessMessage, kind="leaving"):
    """A rank is about to end its process for the reason `why`; this ends the run."""

    why: str


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
FROM_COORDINATOR: tuple[type[ProcessMessage], ...] = (RankAccepted, RankRefused, StatusRequest, RunEnding)
