"""Heartbeats: the status of each rank, written each second to the torch store of the run.

Rank zero reads the heartbeats of all ranks; other ranks read those of rank zero and of ranks on their machine. So reads
grow linearly with the number of ranks. A call of the store blocks while its server is stopped or cut off. Therefore a
thread with its own connection makes the calls, and the monitor judges how long the thread waits.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch.distributed as dist
from pydantic import TypeAdapter

from ds_finetune.cluster.watchdog.progress import PREPARING, RankStatus
from ds_finetune.errors import RUN_ERROR_EXIT_CODE
from ds_finetune.system.error_file import ERROR_FILE
from ds_finetune.system.processes import began_at, own_pid_namespace

BEAT_SECONDS = 1.0
RUNNING, HUNG, FAILING, DONE, ENDED = "running", "hung", "failing", "done", "ended"
"""States of a rank. HUNG: the rank is over its time limit. FAILING: it has an error that another rank may have caused.
DONE: it has finished without an error. ENDED: it knows why the run ends. Before RUNNING, a rank is in PREPARING.
"""
_ENDING, _NONE, _PROCESS = "ending", "none", "process"
_CLOSE_SECONDS, _JOIN_WAIT = 2.0, timedelta(minutes=10)
_LATE_SECONDS, _LATE_WITHIN, _LATE_IN_SUM, _FEWEST_LATE = 0.5, 60.0, 3.0, 3
"""TCP resends a lost packet after 0.2 s, and after 0.6 s if it is lost again. A heartbeat that takes more than
_LATE_SECONDS, instead of milliseconds, is late. The network is at fault if at least _FEWEST_LATE late heartbeats within
_LATE_WITHIN s took more than _LATE_IN_SUM s in sum: a busy processor delays a few.
"""


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank. `began` is its start time from the kernel, empty where there is no /proc; `machine`
    identifies the host together with its pid and network namespaces.
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
        """The `RankProcess` of this process."""
        host, pid, network = socket.gethostname(), os.getpid(), Path("/proc/self/ns/net")
        machine = f"{host} {own_pid_namespace()} {network.readlink() if network.exists() else ''}"
        return cls(rank, host, pid, began_at(pid), machine, os.environ.get(ERROR_FILE, ""))

    def is_beside(self, other: Self) -> bool:
        """Whether both processes are on one machine, so that each can signal the other."""
        return self.rank != other.rank and self.machine == other.machine and bool(self.began)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


@dataclass(frozen=True)
class RunEnding:
    """Why a run ends: the ranks at fault, the reason in one line, details for the report, and the exit code.

    `is_hang`: a hang ended the run. `silent`: ranks without heartbeats, which ranks on the same machine kill.
    """

    at_fault: tuple[int, ...]
    line: str
    text: str = ""
    code: int = RUN_ERROR_EXIT_CODE
    is_hang: bool = False
    silent: tuple[int, ...] = ()

    @property
    def report(self) -> str:
        """The line, followed by the text."""
        return f"{self.line}\n{self.text}".rstrip()


_PROCESS_JSON, _ENDING_JSON, _STATUS_JSON = TypeAdapter(RankProcess), TypeAdapter(RunEnding), TypeAdapter(RankStatus)


def join(store: dist.Store, process: RankProcess, size: int) -> list[RankProcess]:
    """The processes of all ranks; a collective through `store`, after which each rank can read all heartbeats."""
    if process.rank == 0:
        store.set(_ENDING, _NONE)
    store.set(_key(process.rank), "")
    store.set(f"{_PROCESS}/{process.rank}", _PROCESS_JSON.dump_json(process).decode())
    keys = [f"{_PROCESS}/{rank}" for rank in range(size)]
    store.wait(keys, _JOIN_WAIT)
    return [_PROCESS_JSON.validate_json(each) for each in store.multi_get(keys)]


class Heartbeats(threading.Thread):
    """Sends this rank's heartbeat each second; reads the heartbeats of the ranks `watched`, and why the run ends."""

    def __init__(self, store: dist.Store, rank: int, watched: Iterable[int], status: Callable[[], RankStatus]) -> None:
        super().__init__(name="watchdog-heartbeats", daemon=True)
        self.state, self.trouble = PREPARING, ""
        self.proposal: RunEnding | None = None
        """How the run ends, unless another rank has proposed an ending before."""
        self.ending: RunEnding | None = None
        self.is_lost = False
        """Whether the connection to the store is closed, because the process that serves the store has ended."""
        self.answered_at = time.monotonic()
        self.heard_at = dict.fromkeys(watched, self.answered_at)
        """Monotonic time at which the last new heartbeat of each rank was read."""
        # The stubs of torch 2.13 lack `clone`.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._rank, self._status = rank, status
        self._latest = dict.fromkeys(self.heard_at, b"")
        self._late: deque[tuple[float, float]] = deque(maxlen=round(_LATE_WITHIN))
        self._overslept = False
        self._number, self._finished, self._done = 0, 0, threading.Condition()
        self._wake, self._closed = threading.Event(), threading.Event()

    def run(self) -> None:
        """Exchange heartbeats until `close`, or until the store has ended."""
        try:
            while not self._closed.is_set():
                self._exchange()
                began = time.monotonic()
                self._wake.wait(BEAT_SECONDS)
                self._overslept = time.monotonic() > began + BEAT_SECONDS + _LATE_SECONDS
                self._wake.clear()
        except dist.DistError:
            self.is_lost = True

    def _exchange(self) -> None:
        began, self._number = time.monotonic(), self._number + 1
        late = tuple(seconds for at, seconds in self._late if at > began - _LATE_WITHIN)
        is_network = len(late) >= _FEWEST_LATE and sum(late) > _LATE_IN_SUM
        status = replace(self._status(), trouble=self.trouble, late=late if is_network else ())
        if status.seconds < BEAT_SECONDS:
            # A rank that makes progress sends no recent collectives: they would be outdated when read.
            status = replace(status, recent=())
        self._store.set(_key(self._rank), f"{self.state} {self._number} {_STATUS_JSON.dump_json(status).decode()}")
        if self.proposal is not None:
            self._store.compare_set(_ENDING, _NONE, _ENDING_JSON.dump_json(self.proposal).decode())
        ending, *latest = self._store.multi_get([_ENDING, *map(_key, self._latest)])
        now = time.monotonic()
        for rank, beat in zip(self._latest, latest, strict=True):
            if beat != self._latest[rank]:
                self._latest[rank], self.heard_at[rank] = beat, now
        if self.ending is None and ending != _NONE.encode():
            self.ending = _ENDING_JSON.validate_json(ending)
        if now > began + _LATE_SECONDS and not self._overslept:
            self._late.append((now, now - began))
        with self._done:
            self.answered_at, self._finished = now, self._number
            self._done.notify_all()

    def flush(self, seconds: float = 0.0) -> None:
        """Send a heartbeat now; wait at most `seconds` until the store has it."""
        with self._done:
            wanted = self._number + 1
            self._wake.set()
            self._done.wait_for(lambda: self._finished >= wanted, 0 if self.is_lost else seconds)

    def forget_pause(self) -> None:
        """After a pause of this process: count neither silence of other ranks nor late heartbeats of that time."""
        self.answered_at = now = time.monotonic()
        self.heard_at = dict.fromkeys(self.heard_at, now)
        self._late.clear()

    def state_of(self, rank: int) -> str:
        """The state of a watched rank in its last heartbeat; empty before the first."""
        beat = self._latest[rank]
        return beat[: max(beat.find(b" "), 0)].decode()

    def status_of(self, rank: int) -> RankStatus | None:
        """Status of a watched rank in its last heartbeat; None before the first."""
        beat = self._latest[rank]
        return _STATUS_JSON.validate_json(beat.split(b" ", 2)[2]) if beat else None

    def close(self) -> None:
        """End the thread, unless a call of the store blocks it."""
        self._closed.set()
        self._wake.set()
        self.join(_CLOSE_SECONDS)


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
