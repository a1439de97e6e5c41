"""The thread by which this rank watches itself and hears of the others."""

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ds_finetune.errors import RUN_ERROR_EXIT_CODE, USER_ERROR_EXIT_CODE, RunError
from ds_finetune.watchdog.connection import CLOSED, UNREACHABLE, Connection, Message, listen, parsed, waiting
from ds_finetune.watchdog.coordinator import ANSWER_SECONDS, ECHO_SECONDS, LOSSY_SECONDS, REPORT, Coordinator
from ds_finetune.watchdog.coordinator_address import coordinator_address
from ds_finetune.watchdog.process_death import FOLDER, began_at, why_killed
from ds_finetune.watchdog.progress import RankProgress
from ds_finetune.watchdog.report import FailureReport, RankProcess, RunEnding
from ds_finetune.watchdog.run_secret import VARIABLE, agree_on_secret
from ds_finetune.watchdog.stacks import StackFile, end_process, process_id_space
from ds_finetune.world import World

_KEY, _PREPARED = "watchdog/hub", "watchdog/prepared"
_WORD = timedelta(minutes=1)
_NAMED = 16
_CONNECT_SECONDS, _CONNECT_TRIES = 60.0, 3
_TICK_SECONDS = 0.2
_FROZEN_SECONDS = 5.0
_GRACE_SECONDS = 2.0
"""How long a rank that hears of another's end has to end by itself, with an error of its own."""
_HUB_SECONDS = ANSWER_SECONDS + ECHO_SECONDS + 3.0
"""How long rank zero has to answer before it is taken for silent itself."""
_LEAVING_SECONDS = 20.0
"""How long a rank that has failed has to end; what it closes may wait for ranks that are gone."""
_SILENT = "does not answer: stopped, dead, or held outside Python"
_STDERR = 2


class Monitor(threading.Thread):
    """Answers for this rank and ends its process when the run ends elsewhere, or stands still."""

    def __init__(
        self, progress: RankProgress, world: World, link: Connection, zero: RankProcess, output_dir: Path
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.progress = progress
        self._world = world
        self._link = link
        self._zero = zero
        self._place = process_id_space()
        self._folder = output_dir / FOLDER
        self._output_dir = output_dir
        self._stacks: StackFile | None = None
        self._closed = threading.Event()
        self._heard = threading.Event()
        self._ending: RunEnding | None = None
        self._ends_at = self._asked_at = math.inf
        self._lost_before = 0
        self._looked_at = math.inf
        self._is_failing = False
        self._has_written = False

    def run(self) -> None:
        """Until closed."""
        while not self._closed.is_set():
            self._listen()
            self._look_at_clock(time.monotonic())

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """An error inside is told to the others at once; where it only follows from another rank's, RunError names that
        one instead.
        """
        try:
            yield
        except BaseException as error:
            if self._is_failing:
                raise
            first = self._fail(FailureReport.of(error))
            if first is None:
                raise
            # torchrun takes the rank that ends first for the cause.
            time.sleep(_GRACE_SECONDS)
            echo = RunError(
                f"{first.line}; rank {self._world.rank} then met {FailureReport.of(error).line}",
                hint=f"see {self._folder / REPORT} for more",
            )
            # A user's mistake is one on every rank.
            echo.exit_code = first.code or RUN_ERROR_EXIT_CODE
            raise echo from None

    @contextmanager
    def detect_hangs(self, store: dist.Store) -> Iterator[None]:
        """Once every rank has come here, however long that takes, a stand is minded and stacks can be written."""
        store.set(f"{_PREPARED}/{self._world.rank}", "")
        # The thread ends the wait where another rank is lost.
        while missing := self._missing(store):
            if self._world.rank == 0:
                _say(f"watchdog: ranks {', '.join(map(str, missing))} are still preparing\n")
        self._stacks = stacks = StackFile(self._output_dir, self._world.rank)
        try:
            with self.progress.during("start"):
                yield
        finally:
            self._stacks = None
            stacks.close()

    def _missing(self, store: dist.Store) -> list[int]:
        """Ranks that have not prepared within a minute; of many, the first."""
        keys = {rank: f"{_PREPARED}/{rank}" for rank in range(self._world.world_size)}
        try:
            store.wait(list(keys.values()), _WORD)
        except dist.DistStoreError:
            return [rank for rank, key in keys.items() if not store.check([key])][:_NAMED]
        return []

    def close(self) -> None:
        """Say goodbye, unless this rank has failed, and watch no more."""
        # Before the goodbye, at which the hub closes the connection.
        self._closed.set()
        self.join(_LEAVING_SECONDS)
        if not self._is_failing:
            self._link.send({"kind": "bye"})
        self._link.part()

    @contextmanager
    def announce_exits(self) -> Iterator[None]:
        """While it is open a call of `os._exit` tells the others first, who would take it for a death by a signal."""
        leave, pid = os._exit, os.getpid()

        def stated(code: int) -> NoReturn:
            # A process that was forked from this one shares the connection, and is no rank.
            if os.getpid() == pid and not self._closed.is_set():
                caller = sys._getframe(1)
                self._state(f"called os._exit({code}) at {caller.f_code.co_filename}:{caller.f_lineno}")
            leave(code)

        os._exit = stated  # type: ignore[assignment]
        try:
            yield
        finally:
            os._exit = leave

    def _state(self, why: str) -> None:
        """Say why this rank leaves, and wait until that is heard."""
        if self._ending is None:
            self._link.send({"kind": "leaving", "why": why})
        self._closed.set()
        self._link.part()

    def _fail(self, failure: FailureReport) -> RunEnding | None:
        """Tell of a failure; the ending that another rank was the first of, where this one's is but an echo."""
        self._is_failing = True
        self._ends_at = time.monotonic() + _LEAVING_SECONDS
        if self._ending is None:
            self._link.send({"kind": "failed", "failure": asdict(failure)})
        self._heard.wait(_HUB_SECONDS if failure.is_secondary else ECHO_SECONDS)
        is_others = self._ending is not None and failure.is_secondary and self._world.rank not in self._ending.first
        return self._ending if is_others else None

    def _listen(self) -> None:
        if self._link.is_lost:
            time.sleep(_TICK_SECONDS)
        elif waiting([self._link], _TICK_SECONDS):
            self._hear()
        if self._link.is_lost and self._ending is None and not self._closed.is_set():
            self._end(self._without_hub(self._why_lost()))

    def _hear(self) -> None:
        for message in self._link.received():
            try:
                self._obey(message)
            except ValueError as wrong:
                _say(f"watchdog: rank {self._world.rank} cannot read a message of rank 0, and ignores it: {wrong}\n")

    def _obey(self, message: Message) -> None:
        match message["kind"]:
            case "ask":
                self._link.send({"kind": "answer", "answer": self.progress.status().as_json()})
                self._write_stacks()
            case "wait" if self._asked_at < math.inf:
                self._asked_at = time.monotonic() + LOSSY_SECONDS
            case "end":
                self._end(parsed(RunEnding, message.get("ending")))

    def _why_lost(self) -> str:
        killed = why_killed(self._folder, self._zero.pid, self._zero.began) if self._link.why == CLOSED else ""
        return f"was ended by the watchdog: {killed}" if killed else self._link.why

    def _is_lossy(self) -> bool:
        """Whether packets to rank zero were lost since this rank asked."""
        loss = self._link.loss()
        return loss.unacknowledged > 0 or loss.lost > self._lost_before

    def _look_at_clock(self, now: float) -> None:
        if now - self._looked_at > _FROZEN_SECONDS:
            # The whole process was stopped, as by a suspended job or machine, and the others perhaps with it.
            self.progress.restart_limit()
        self._looked_at = now
        until = self.progress.last_progress_at() + self.progress.limit_seconds()
        if self._stacks is not None:
            self._stacks.arm(until)
        if now > self._ends_at and self._ending is not None:
            self._leave(self._ending)
        elif now > self._ends_at:
            self._leave(self._without_hub(_SILENT))
        elif now > self._asked_at + _HUB_SECONDS + (LOSSY_SECONDS if self._is_lossy() else 0.0):
            self._leave(self._without_hub(UNREACHABLE if self._is_lossy() else _SILENT))
        elif now > until and self._asked_at == math.inf and self._ending is None:
            self._asked_at, self._lost_before = now, self._link.loss().lost
            still, limit = now - until + self.progress.limit_seconds(), self.progress.limit_seconds()
            why = f"  rank {self._world.rank} has made no progress for {still:,.0f} s, and its limit is {limit:,.0f} s"
            self._link.send({"kind": "still", "why": why})
            self._write_stacks()

    def _end(self, ending: RunEnding) -> None:
        if self._ending is not None:
            return
        self._ending = ending
        if not self._is_failing:
            self._ends_at = time.monotonic() + (0.0 if ending.is_still else _GRACE_SECONDS)
        if self._world.rank == ending.speaker and self._world.rank not in ending.first:
            _say(f"watchdog: {ending.report}\n")
        self._heard.set()

    def _without_hub(self, why: str) -> RunEnding:
        """The ending that rank zero would have told of, if it were there; the first rank that comes to it writes the
        report.
        """
        line = f"{self._zero} {why}"
        with suppress(OSError), (self._folder / REPORT).open("x", encoding="utf-8") as report:
            report.write(f"{line}\n")
        # Each rank beside it that sees its process ends it: none knows of the others.
        is_beside = self._zero.place == self._place and why != UNREACHABLE
        ended_by = {str(self._world.rank): [(self._zero.pid, self._zero.began)]} if is_beside else {}
        return RunEnding((0,), line, line, RUN_ERROR_EXIT_CODE, -1, False, ended_by)

    def _leave(self, ending: RunEnding) -> NoReturn:
        """End the process: its other threads wait for something that does not come."""
        if self._world.local_rank == 0 or str(self._world.rank) in ending.ended_by:
            _say(f"watchdog: rank {self._world.rank} ends: {ending.line}\n")
        if ending.code != USER_ERROR_EXIT_CODE:
            self._write_stacks()
        elif self._stacks is not None:
            self._stacks.close()
        for pid, began in ending.ended_by.get(str(self._world.rank), []):
            end_process(pid, began, folder=self._folder, why=ending.line)
        if ending.ended_by:
            # A launcher that sees one rank end may signal those that are ending others.
            time.sleep(1.5)
        self._state(f"left: {ending.line}")
        os._exit(ending.code or RUN_ERROR_EXIT_CODE)

    def _write_stacks(self) -> None:
        if self._stacks is not None and not self._has_written:
            self._has_written = True
            self._stacks.write(self.progress.status())


@contextmanager
def start_monitor(progress: RankProgress, world: World, store: dist.Store, output_dir: Path) -> Iterator[Monitor]:
    """Watch this rank and the others while it is open; every rank opens it, with the store they met at.

    RunError where rank zero does not take this rank.
    """
    member = RankProcess(world.rank, socket.gethostname(), os.getpid(), began_at(os.getpid()), process_id_space())
    secret = agree_on_secret(store, world, folder=output_dir, environ=os.environ, say=lambda line: _say(f"{line}\n"))
    hub = _start_hub(member, world, store, secret, output_dir) if world.rank == 0 else None
    address, port, zero = json.loads(store.get(_KEY))
    link = _join(member, (address or world.master_addr, int(port)), secret)
    monitor = Monitor(progress, world, link, parsed(RankProcess, zero), output_dir)
    monitor.start()
    try:
        with monitor.announce_exits(), monitor.report_errors():
            yield monitor
    finally:
        monitor.close()
        if hub is not None:
            # Others may take longer to leave, and would take this rank for dead.
            hub.join()


def _start_hub(member: RankProcess, world: World, store: dist.Store, secret: bytes, output_dir: Path) -> Coordinator:
    address = coordinator_address(world, os.environ)
    listener = listen(address)
    hub = Coordinator(listener, secret, world.world_size, output_dir)
    hub.start()
    store.set(_KEY, json.dumps([address, listener.getsockname()[1], asdict(member)]))
    return hub


def _join(member: RankProcess, place: tuple[str, int], secret: bytes) -> Connection:
    """The connection of a rank that rank zero has welcomed."""
    where, why = f"{place[0]}:{place[1]}", ""
    for _ in range(_CONNECT_TRIES):
        try:
            link = Connection.to(*place, secret, timeout=_CONNECT_SECONDS)
        except OSError as error:
            why = str(error)
            continue
        if not link.is_lost:
            link.send({"kind": "hello", "member": asdict(member)})
            why = _refusal(link)
            if not why:
                return link
        link.close()
    raise RunError(
        f"rank {member.rank} is not accepted by the watchdog of rank 0 at {where}: {why}",
        hint=f"{VARIABLE} must be the same on every rank or on none, and the program the same version",
    )


def _refusal(link: Connection) -> str:
    """Why rank zero does not take this rank; empty where it does."""
    until = time.monotonic() + _CONNECT_SECONDS
    while not link.is_lost and time.monotonic() < until:
        for message in link.received() if waiting([link], 1.0) else []:
            if message["kind"] == "welcome":
                return ""
            return str(message.get("why", message["kind"]))
    return "its secret is another" if link.is_lost else f"no answer within {_CONNECT_SECONDS:.0f} s"


def _say(text: str) -> None:
    """Straight to the screen: the thread that trains may hold Python's own stream."""
    # A full disk or a closed pipe behind it must not end this thread, which ends the run.
    with suppress(OSError):
        os.write(_STDERR, text.encode())
