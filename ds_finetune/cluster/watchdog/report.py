"""Messages about a rank's failure and the end of a run, and the text of the report."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from ds_finetune.cluster.watchdog.diagnosis import Diagnosis
from ds_finetune.cluster.watchdog.progress import RankStatus
from ds_finetune.errors import RUN_ERROR_EXIT_CODE, FinetuneError
from ds_finetune.system.process_messages import ProcessMessage

_MAX_LINES = 50
_MAX_TEXT_CHARACTERS, _MAX_LINE_CHARACTERS = 200_000, 2_000
_MAX_RANKS = 16
_PEER_LOST_WORDS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "TCPStore")
"""Words in errors that torch raises when another rank has exited (torch 2.13: RuntimeError from gloo, DistBackendError
from NCCL).
"""


@dataclass(frozen=True)
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
        """For people."""
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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


def hosts_text(processes: Sequence[RankProcess]) -> str:
    """`rank 3 (host b, process 17)`, or `4 ranks of hosts b, c`."""
    if len(processes) == 1:
        return str(processes[0])
    hosts = list(dict.fromkeys(process.host for process in processes))
    return f"{len(processes)} ranks of host{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:_MAX_RANKS])}"


def status_lines(
    processes: Mapping[int, RankProcess], statuses: Mapping[int, RankStatus | None], diagnosis: Diagnosis
) -> list[str]:
    """What each rank is doing, those at fault first; ranks that do the same share a line."""
    lines = [f"  {_name(processes, rank)}: {_status_text(statuses[rank])}" for rank in diagnosis.at_fault[:_MAX_RANKS]]
    others: dict[str, list[int]] = {}
    for rank in statuses.keys() - set(diagnosis.at_fault):
        others.setdefault(_status_text(statuses[rank]), []).append(rank)
    for text, ranks in list(others.items())[:_MAX_RANKS]:
        who = _name(processes, ranks[0]) + (f" and {len(ranks) - 1:,} more" if len(ranks) > 1 else "")
        lines.append(f"  {who}: {text}")
    return lines


def _status_text(status: RankStatus | None) -> str:
    return "no answer" if status is None else str(status)


def _name(processes: Mapping[int, RankProcess], rank: int) -> str:
    return str(processes.get(rank, f"rank {rank} (never connected)"))
