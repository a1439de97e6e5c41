"""Messages that the ranks of a run exchange through torch's store: facts of their processes, and why the run ends."""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from pydantic import TypeAdapter

from ds_finetune.cluster.watchdog.progress import RankStatus
from ds_finetune.engine.devices import exchange
from ds_finetune.errors import RUN_ERROR_EXIT_CODE
from ds_finetune.system.processes import began_at, own_namespace
from ds_finetune.system.rank_files import ERROR_FILE
from ds_finetune.system.world import World

_JOIN_TIMEOUT = timedelta(minutes=10)
ENDING, NONE = "ending", "none"
"""ENDING is the key of torch's store for the reason why the run ends (a RunEnding). Until then its value is NONE."""


@dataclass(frozen=True)
class RankProcess:
    """Identifies the process of a rank. `began` is the start time of the process from the kernel, empty where there is
    no /proc. `machine` identifies the host together with the pid and network namespaces of the process.
    """

    rank: int
    host: str
    pid: int
    began: str
    machine: str
    error_file: str = ""
    """Path at which torch's elastic agent looks for this rank's error; empty without an agent."""

    @classmethod
    def here(cls, rank: int) -> Self:
        """Make the `RankProcess` that describes this process."""
        host, pid = socket.gethostname(), os.getpid()
        machine = f"{host} {own_namespace('pid')} {own_namespace('net')}"
        return cls(rank, host, pid, began_at(pid), machine, os.environ.get(ERROR_FILE, ""))

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


@dataclass(frozen=True)
class RunEnding:
    """Why a run ends: the ranks at fault, the reason in one line, details for the report, and the exit code.

    `is_hang` says that a hang ended the run. `is_silent` says that the ranks at fault send no heartbeats; other ranks
    on their machine then kill them.
    """

    at_fault: tuple[int, ...]
    line: str
    text: str = ""
    code: int = RUN_ERROR_EXIT_CODE
    is_hang: bool = False
    is_silent: bool = False

    @property
    def report(self) -> str:
        """Text of the watchdog's report: the line with the reason why the run ends, then the details."""
        return f"{self.line}\n{self.text}".rstrip()


_PROCESS_JSON, ENDING_JSON, STATUS_JSON = TypeAdapter(RankProcess), TypeAdapter(RunEnding), TypeAdapter(RankStatus)


def join(store: dist.Store, world: World, own: RankProcess) -> list[RankProcess]:
    """Exchange facts of the processes of all ranks through `store`, and return them in the order of ranks. Afterwards
    the store has a first heartbeat of each rank.
    """
    if own.rank == 0:
        store.set(ENDING, NONE)
    store.set(heartbeat_key(own.rank), STATUS_JSON.dump_json(RankStatus()).decode())
    texts = exchange(store, world, "process", _PROCESS_JSON.dump_json(own).decode(), timeout=_JOIN_TIMEOUT)
    return [_PROCESS_JSON.validate_json(text) for text in texts]


def heartbeat_key(rank: int) -> str:
    """Key of the store under which the last heartbeat (a RankStatus) of `rank` is written."""
    return f"heartbeat/{rank}"
