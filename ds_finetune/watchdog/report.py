"""Why a run is ended: the failing rank, its error, and the text that the report and the screen show."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from ds_finetune.errors import RUN_ERROR_EXIT_CODE, FinetuneError
from ds_finetune.process_messages import ProcessMessage
from ds_finetune.watchdog.diagnosis import Diagnosis
from ds_finetune.watchdog.progress import RankStatus

_MAX_LINES = 50
_MAX_TEXT_LETTERS, _MAX_LINE_LETTERS = 200_000, 2_000
_MAX_RANKS = 16
_PEER_LOST_WORDS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "TCPStore")
"""In errors that torch raises where another rank is gone (torch 2.13: RuntimeError from gloo, DistBackendError from
NCCL).
"""


@dataclass(frozen=True)
class RankProcess(ProcessMessage, kind="hello"):
    """The process of a rank, with which its connection begins.

    `began` is the kernel's start time of the process, and `id_space` where its process id is valid (stacks.py).
    """

    rank: int
    host: str
    pid: int
    began: str
    id_space: str

    def __str__(self) -> str:
        """For people."""
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


@dataclass(frozen=True)
class FailureReport(ProcessMessage, kind="failed"):
    """An error of a rank in one `line`, with its last lines as `text` and the exit code.

    `is_secondary` says that the error may follow from the end of another rank.
    """

    line: str
    text: str
    code: int
    is_secondary: bool

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """What the other ranks are told of `error`."""
        is_own = isinstance(error, FinetuneError)
        lines = (str(error) if is_own else "".join(traceback.format_exception(error))).splitlines()
        code = error.exit_code if isinstance(error, FinetuneError) else RUN_ERROR_EXIT_CODE
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        text = "\n".join(lines[-_MAX_LINES:])[-_MAX_TEXT_LETTERS:]
        return cls(f"{type(error).__name__}: {line[:_MAX_LINE_LETTERS]}", text, code, is_secondary(error))


@dataclass(frozen=True)
class RunEnding(ProcessMessage, kind="end"):
    """Why a run ends: the ranks at fault, the reason in one line, the report, and the exit code.

    `reporter` is the rank that prints the report, and `killers` names the ranks that kill others, each with the
    process ids and start times of those. `is_hang` where a hang ended the run.
    """

    at_fault: tuple[int, ...]
    line: str
    report: str
    code: int
    reporter: int
    is_hang: bool
    killers: dict[str, list[tuple[int, str]]]


def is_secondary(error: BaseException) -> bool:
    """Whether `error` is one that a rank meets when another rank is gone, so that the cause may lie there."""
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
