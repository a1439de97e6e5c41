"""What is said when a run is ended: one text, the same in the report and on the screen."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch.distributed as dist

from ds_finetune.errors import RUN_ERROR_EXIT_CODE, FinetuneError
from ds_finetune.watchdog.diagnosis import Diagnosis
from ds_finetune.watchdog.progress import RankStatus

_LINES = 50
_TEXT_LETTERS, _LINE_LETTERS = 200_000, 2_000
_RANKS = 16
_OF_OTHERS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "TCPStore")
"""In errors that torch raises where another rank is gone (torch 2.13: RuntimeError from gloo, DistBackendError from
NCCL).
"""


@dataclass(frozen=True)
class RankProcess:
    """A rank: its host, its process, when that began and where its id means something."""

    rank: int
    host: str
    pid: int
    began: str
    place: str

    def __str__(self) -> str:
        """For people."""
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


@dataclass(frozen=True)
class FailureReport:
    """An error of a rank: in one line, with its last lines, the exit code, and whether it may follow from another
    rank's end.
    """

    line: str
    text: str
    code: int
    is_secondary: bool

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """What others are told of `error`."""
        lines = (
            str(error).splitlines()
            if isinstance(error, FinetuneError)
            else "".join(traceback.format_exception(error)).splitlines()
        )
        code = error.exit_code if isinstance(error, FinetuneError) else RUN_ERROR_EXIT_CODE
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        text = "\n".join(lines[-_LINES:])[-_TEXT_LETTERS:]
        return cls(f"{type(error).__name__}: {line[:_LINE_LETTERS]}", text, code, is_secondary(error))


@dataclass(frozen=True)
class RunEnding:
    """Why a run ends: the ranks it began with, a line, a report, the exit code, who prints it, and which ranks end
    others by process id.
    """

    first: tuple[int, ...]
    line: str
    report: str
    code: int
    speaker: int
    is_still: bool
    ended_by: dict[str, list[tuple[int, str]]]

    def as_json(self) -> dict[str, Any]:
        """Plain values, of which `parsed` makes the same again."""
        return asdict(self)


def is_secondary(error: BaseException) -> bool:
    """Whether `error` is what a rank meets when another one is gone, so that the cause may lie there."""
    told = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_OTHERS)
    )
    return told and not isinstance(error, FinetuneError)


def hosts_text(members: Sequence[RankProcess]) -> str:
    """`rank 3 (host b, process 17)`, or `4 ranks of hosts b, c`."""
    if len(members) == 1:
        return str(members[0])
    hosts = list(dict.fromkeys(member.host for member in members))
    return f"{len(members)} ranks of host{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:_RANKS])}"


def status_lines(
    members: Mapping[int, RankProcess], answers: Mapping[int, RankStatus | None], found: Diagnosis
) -> list[str]:
    """What each rank is doing, at_fault ones first; many that do the same are one line."""
    lines = [f"  {_named(members, rank)}: {_said(answers[rank])}" for rank in found.at_fault[:_RANKS]]
    others: dict[str, list[int]] = {}
    for rank in answers.keys() - set(found.at_fault):
        others.setdefault(_said(answers[rank]), []).append(rank)
    for said, ranks in list(others.items())[:_RANKS]:
        who = _named(members, ranks[0]) + (f" and {len(ranks) - 1:,} more" if len(ranks) > 1 else "")
        lines.append(f"  {who}: {said}")
    return lines


def _said(answer: RankStatus | None) -> str:
    return "no answer" if answer is None else str(answer)


def _named(members: Mapping[int, RankProcess], rank: int) -> str:
    return str(members.get(rank, f"rank {rank} (never seen)"))
