"""Heartbeats: the status of each rank, written each second to the torch store of the run.

Rank zero reads the heartbeats of all ranks; other ranks read that of rank zero. So reads grow linearly with the number
of ranks. A call of the store blocks while its server is stopped or cut off. Therefore a thread with its own connection
makes the calls, and the monitor judges how long the thread waits.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch.distributed as dist
from pydantic import TypeAdapter

from ds_finetune.cluster.watchdog.progress import RUNNING, RankStatus
from ds_finetune.engine.devices import exchange
from ds_finetune.errors import RUN_ERROR_EXIT_CODE
from ds_finetune.system.error_file import ERROR_FILE
from ds_finetune.system.processes import began_at, own_pid_namespace
from ds_finetune.system.world import World

BEAT_SECONDS = 1.0
_ENDING, _NONE = "ending", "none"
_CLOSE_SECONDS, _JOIN_TIMEOUT = 2.0, timedelta(minutes=10)
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

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


@dataclass(frozen=True)
class RunEnding:
    """Why a run ends: the ranks at fault, the reason in one line, details for the report, and the exit code.

    `is_hang`: a hang ended the run. `is_silent`: the ranks at fault send no heartbeats, so ranks on the same machine
    kill them.
    """

    at_fault: tuple[int, ...]
    line: str
    text: str = ""
    code: int = RUN_ERROR_EXIT_CODE
    is_hang: bool = False
    is_silent: bool = False

    @property
    def report(self) -> str:
        """The line, followed by the text."""
        return f"{self.line}\n{self.text}".rstrip()


_PROCESS_JSON, _ENDING_JSON, _STATUS_JSON = TypeAdapter(RankProcess), TypeAdapter(RunEnding), TypeAdapter(RankStatus)


def join(store: dist.Store, world: World, own: RankProcess) -> list[RankProcess]:
    """The processes of all ranks; a collective through `store`, after which each rank can read all heartbeats."""
    if own.rank == 0:
        store.set(_ENDING, _NONE)
    store.set(_key(own.rank), _STATUS_JSON.dump_json(RankStatus()).decode())
    texts = exchange(store, world, "process", _PROCESS_JSON.dump_json(own).decode(), timeout=_JOIN_TIMEOUT)
    return [_PROCESS_JSON.validate_json(text) for text in texts]


class Heartbeats(threading.Thread):
    """Sends this rank's heartbeat each second; reads the heartbeats of the ranks `watched`, and why the run ends."""

    def __init__(self, store: dist.Store, rank: int, watched: Iterable[int], status: Callable[[], RankStatus]) -> None:
        super().__init__(name="watchdog-heartbeats", daemon=True)
        self.state, self.trouble = RUNNING, ""
        self.proposal: RunEnding | None = None
        """How the run ends, unless another rank has proposed an ending before."""
        self.ending: RunEnding | None = None
        self.is_lost = False
        """Whether the connection to the store is closed, because the process that serves the store has ended."""
        self.answered_at = time.monotonic()
        self.heard_at = dict.fromkeys(watched, self.answered_at)
        """Monotonic time at which the last new heartbeat of each watched rank was read."""
        self.latest = dict.fromkeys(self.heard_at, RankStatus())
        """The last heartbeat of each watched rank."""
        # The stubs of torch 2.13 lack `clone`.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._rank, self._status = rank, status
        self._late: deque[tuple[float, float]] = deque(maxlen=round(_LATE_WITHIN))
        self._number, self._overslept, self._is_closed = 0, False, False
        self._wake = threading.Event()

    def run(self) -> None:
        """Exchange heartbeats until `close`, or until the store has ended."""
        is_last = False
        with suppress(dist.DistError):
            while not is_last:
                is_last = self._is_closed
                self._exchange()
                began = time.monotonic()
                self._wake.wait(0.0 if is_last else BEAT_SECONDS)
                self._overslept = time.monotonic() > began + BEAT_SECONDS + _LATE_SECONDS
                self._wake.clear()
        self.is_lost = not is_last

    def _exchange(self) -> None:
        began, self._number = time.monotonic(), self._number + 1
        late = [seconds for at, seconds in self._late if at > began - _LATE_WITHIN]
        worst = max(late) if len(late) >= _FEWEST_LATE and sum(late) > _LATE_IN_SUM else 0.0
        status = replace(
            self._status(), state=self.state, number=self._number, trouble=self.trouble, late_seconds=worst
        )
        self._store.set(_key(self._rank), _STATUS_JSON.dump_json(status).decode())
        if self.proposal is not None:
            self._store.compare_set(_ENDING, _NONE, _ENDING_JSON.dump_json(self.proposal).decode())
        ending, *texts = self._store.multi_get([_ENDING, *map(_key, self.heard_at)])
        now = time.monotonic()
        for rank, text in zip(self.heard_at, texts, strict=True):
            if (latest := _STATUS_JSON.validate_json(text)).number != self.latest[rank].number:
                self.latest[rank], self.heard_at[rank] = latest, now
        if self.ending is None and ending != _NONE.encode():
            self.ending = _ENDING_JSON.validate_json(ending)
        if now > began + _LATE_SECONDS and not self._overslept:
            self._late.append((now, now - began))
        self.answered_at = now

    def send(self) -> None:
        """Send a heartbeat at once."""
        self._wake.set()

    def forget_pause(self) -> None:
        """After a pause of this process: count neither silence of other ranks nor late heartbeats of that time."""
        self.answered_at = now = time.monotonic()
        self.heard_at = dict.fromkeys(self.heard_at, now)
        self._late.clear()

    def close(self) -> None:
        """Send a last heartbeat and end the thread, unless a call of the store blocks it."""
        self._is_closed = True
        self._wake.set()
        self.join(_CLOSE_SECONDS)


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
