"""Each rank's side of the watchdog: a thread that detects a hang of its rank, and ends it when another rank fails."""

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ds_finetune.cluster.watchdog import messages
from ds_finetune.cluster.watchdog.connection import (
    CLOSED,
    NO_PACKETS,
    UNREACHABLE_SECONDS,
    Connection,
    coordinator_address,
    listen,
    packet_counts,
    wait_readable,
)
from ds_finetune.cluster.watchdog.coordinator import REPORT, SECONDARY_ERROR_SECONDS, STATUS_SECONDS, Coordinator
from ds_finetune.cluster.watchdog.diagnosis import SILENT
from ds_finetune.cluster.watchdog.kills import FOLDER, StackFile, kill_process, record_cause, why_killed
from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.cluster.watchdog.run_secret import VARIABLE, agree_on_secret
from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.errors import RUN_ERROR_EXIT_CODE, USER_ERROR_EXIT_CODE, RunError
from ds_finetune.runs.status import mark_ended, try_to_finish, try_to_read
from ds_finetune.system.process_messages import ProcessMessage, decode, encode
from ds_finetune.system.processes import PauseDetector, began_at, own_pid_namespace
from ds_finetune.system.world import World

_COORDINATOR_KEY, _JOINED_KEY, _PREPARED_KEY = "watchdog/coordinator", "watchdog/joined", "watchdog/prepared"
_PREPARED_WAIT = timedelta(minutes=1)
_MAX_NAMED_RANKS = 16
_CONNECT_SECONDS, _CONNECT_TRIES = 60.0, 3
_JOIN_WAIT = timedelta(minutes=10)
_JOIN_HINT = f"{VARIABLE} must be the same on every rank or on none, and the program the same version"
_TICK_SECONDS = 0.2
_GRACE_SECONDS = 2.0
"""How long a rank that is told of the run's end has to end with an error of its own, before it is ended."""
_COORDINATOR_SECONDS = STATUS_SECONDS + UNREACHABLE_SECONDS
"""How long the coordinator has to answer before the rank takes the coordinator for hung. However many packets are lost,
an answer has arrived by then or the connection is lost.
"""
_LEAVING_SECONDS = 20.0
"""How long a rank that has failed has to end: its cleanup may wait for ranks that have exited."""
_STDERR = 2


class Monitor(threading.Thread):
    """Answers the coordinator for this rank, and ends its process when another rank fails or the run hangs."""

    def __init__(
        self, progress: RankProgress, world: World, connection: Connection, zero: messages.RankProcess, output_dir: Path
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.progress = progress
        self._world = world
        self._connection = connection
        self._zero = zero
        self._pid_namespace = own_pid_namespace()
        self._folder = output_dir / FOLDER
        self._output_dir = output_dir
        self._stacks: StackFile | None = None
        self._closed = threading.Event()
        self._ending_known = threading.Event()
        self._ending: messages.RunEnding | None = None
        self._ends_at = self._reported_at = math.inf
        self._packets, self._packets_at = NO_PACKETS, -math.inf
        self._pauses = PauseDetector()
        self.log: Say = say_nothing
        """Adds a line to the log of the run."""
        self._is_failing = False
        self._has_written = False

    def run(self) -> None:
        """Serve until closed."""
        while not self._closed.is_set():
            self._read()
            self._act_on_deadlines(time.monotonic())

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Report an error inside to the other ranks at once.

        An error that is only a consequence of another rank's failure is replaced by a RunError that names that rank.
        """
        try:
            yield
        except BaseException as error:
            if self._is_failing:
                raise
            cause = self._report_failure(messages.FailureReport.of(error))
            if cause is None:
                raise
            self._record_cause(cause)
            # torchrun reports the rank that exits first as the cause, so let the other rank exit first.
            time.sleep(_GRACE_SECONDS)
            secondary = RunError(
                f"{cause.line}; rank {self._world.rank} then met {messages.FailureReport.of(error).line}",
                hint=f"see {self._folder / REPORT} for more",
            )
            # Every rank exits with the same code, e.g. the one for a user's mistake.
            secondary.exit_code = cause.code or RUN_ERROR_EXIT_CODE
            raise secondary from None

    @contextmanager
    def watch_from_start(self, store: dist.Store) -> Iterator[None]:
        """Wait for every rank, without a limit; then detect hangs and write stacks while it is open."""
        self.wait_until_prepared(store)
        self._stacks = stacks = StackFile(self._output_dir, self._world.rank)
        try:
            with self.progress.during("start"):
                yield
        finally:
            self._stacks = None
            stacks.close()

    def wait_until_prepared(self, store: dist.Store, what: str = "run") -> None:
        """Wait, without a limit, until every rank has prepared `what` too; rank zero prints each minute who has not.

        If another rank fails meanwhile, this thread ends the process and with it the wait.
        """
        keys = {rank: f"{_PREPARED_KEY}/{what}/{rank}" for rank in range(self._world.world_size)}
        store.set(keys[self._world.rank], "")
        while missing := _unset(keys, store):
            if self._world.rank == 0:
                _print(f"watchdog: ranks {', '.join(map(str, missing))} are still preparing\n")

    def close(self) -> None:
        """Say goodbye to the coordinator, unless this rank has failed, and stop."""
        # Stop this thread before the goodbye: the coordinator then closes the connection, which would look like a loss.
        self._closed.set()
        self.join(_LEAVING_SECONDS)
        if not self._is_failing:
            self._connection.send(messages.RankGoodbye())
        self._connection.close_after_reading()

    @contextmanager
    def announce_exits(self) -> Iterator[None]:
        """While open, announce calls of `os._exit` to the coordinator, which would take them for deaths by a signal."""
        leave, pid = os._exit, os.getpid()

        def announce_and_leave(code: int) -> NoReturn:
            # A forked process shares the connection but is not a rank.
            if os.getpid() == pid and not self._closed.is_set():
                caller = sys._getframe(1)
                why = f"called os._exit({code}) at {caller.f_code.co_filename}:{caller.f_lineno}"
                try_to_finish(lambda: record_cause(self._folder, f"rank {self._world.rank} {why}"))
                self._announce_exit(why)
            leave(code)

        os._exit = announce_and_leave  # type: ignore[assignment]
        try:
            yield
        finally:
            os._exit = leave

    def _record_cause(self, ending: messages.RunEnding) -> None:
        """Record for `ds-finetune launch` that this rank ends because the run does."""
        # A user's mistake leaves no files.
        if ending.code != USER_ERROR_EXIT_CODE:
            try_to_finish(lambda: record_cause(self._folder, ending.line))

    def _announce_exit(self, why: str) -> None:
        """Tell the coordinator why this rank ends, and wait until it has read the message."""
        if self._ending is None:
            self._connection.send(messages.RankLeaving(why))
        self._closed.set()
        self._connection.close_after_reading()

    def _report_failure(self, failure: messages.FailureReport) -> messages.RunEnding | None:
        """Report a failure; return the run's ending where this failure is only a consequence of another rank's."""
        self._is_failing = True
        self._ends_at = time.monotonic() + _LEAVING_SECONDS
        if self._ending is None:
            self._connection.send(failure)
        self._ending_known.wait(_COORDINATOR_SECONDS if failure.is_secondary else SECONDARY_ERROR_SECONDS)
        ending = self._ending
        is_others = ending is not None and failure.is_secondary and self._world.rank not in ending.at_fault
        return ending if is_others else None

    def _read(self) -> None:
        """Handle messages that have arrived; a lost connection means that the coordinator's process is dead."""
        readable = wait_readable([] if self._connection.is_lost else [self._connection], _TICK_SECONDS)
        # Messages that have waited meanwhile set deadlines of their own, which are not to be moved.
        self._exclude_pause()
        if readable:
            for message in self._connection.receive():
                self._handle(message)
        if self._connection.is_lost and self._ending is None and not self._closed.is_set():
            self._accept_ending(self._ending_without_coordinator(self._why_coordinator_lost()))

    def _handle(self, message: ProcessMessage) -> None:
        match message:
            case messages.StatusRequest():
                losses = packet_counts().losses_since(self._packets)
                self._connection.send(replace(self.progress.status(), losses=losses))
                self._write_stacks()
            case messages.RunEnding():
                self._accept_ending(message)

    def _why_coordinator_lost(self) -> str:
        why = self._connection.why_lost
        if why != CLOSED:
            return why
        killed = try_to_read(lambda: why_killed(self._folder, self._zero.pid, self._zero.began), "")
        return f"was ended by the watchdog: {killed}" if killed else why

    def _exclude_pause(self) -> None:
        """Move every deadline by the pause since the last call, if there was one, and print that."""
        pause = self._pauses.last_pause()
        if pause is None:
            return
        self.progress.exclude_pause(pause.monotonic_seconds)
        self._ends_at += pause.monotonic_seconds
        self._reported_at += pause.monotonic_seconds
        if (stacks := self._stacks) is not None:
            try_to_finish(stacks.resume)
        if not pause.is_of_process:
            return
        line = f"watchdog: rank {self._world.rank} was paused for {pause.seconds:,.0f} s and runs again"
        _print(f"{line}\n")
        try_to_finish(lambda: self.log(line))

    def _act_on_deadlines(self, now: float) -> None:
        """Do what is due: report a hang of this rank, or end the process."""
        limit = self.progress.limit_seconds()
        until = self.progress.last_progress_at() + limit
        if now > self._packets_at + limit / 4 and self.progress.last_progress_at() > self._packets_at:
            # Losses are those since here: not much longer ago than the last progress.
            self._packets, self._packets_at = packet_counts(), now
        if self._stacks is not None:
            # Past the limit, too, the timer only ends the process where this thread no longer runs.
            self._stacks.arm(max(until, now))
        if now > self._ends_at and self._ending is not None:
            self._leave(self._ending)
        elif now > min(self._ends_at, self._reported_at + _COORDINATOR_SECONDS):
            self._leave(self._ending_without_coordinator(SILENT))
        elif now > until and self._reported_at == math.inf and self._ending is None:
            self._report_hang(now, seconds=now - until + limit, limit=limit)

    def _report_hang(self, now: float, *, seconds: float, limit: float) -> None:
        self._reported_at = now
        why = f"rank {self._world.rank} has made no progress for {seconds:,.0f} s, and its limit is {limit:,.0f} s"
        self._connection.send(messages.HangReport(f"  {why}"))
        self._write_stacks()

    def _accept_ending(self, ending: messages.RunEnding) -> None:
        if self._ending is not None:
            return
        self._ending = ending
        if not self._is_failing:
            self._ends_at = time.monotonic() + (0.0 if ending.is_hang else _GRACE_SECONDS)
        # An error of the user is usually that of every rank: the reporter prints its own, or this report as it leaves.
        is_own = self._world.rank in ending.at_fault or ending.code == USER_ERROR_EXIT_CODE
        if self._world.rank == ending.reporter and not is_own:
            _print(f"watchdog: {ending.report}\n")
        self._ending_known.set()

    def _ending_without_coordinator(self, why: str) -> messages.RunEnding:
        """The ending for a dead or hung coordinator, made by each rank itself; the first to do so writes the report."""
        line = f"{self._zero} {why}"
        try_to_finish(lambda: self._write_first_report(line))
        mark_ended(self._output_dir, "hung" if why == SILENT else "failed", line)
        # Each rank that sees rank zero's process kills it, because the ranks cannot agree on one of them. Where the
        # connection is lost, rank zero is dead, or it lives and has given up this rank because packets are lost.
        is_killer = why == SILENT and self._zero.pid_namespace == self._pid_namespace
        killers = {str(self._world.rank): [(self._zero.pid, self._zero.began)]} if is_killer else {}
        return messages.RunEnding((0,), line, line, RUN_ERROR_EXIT_CODE, reporter=-1, is_hang=False, killers=killers)

    def _write_first_report(self, line: str) -> None:
        with suppress(OSError), (self._folder / REPORT).open("x", encoding="utf-8") as report:
            report.write(f"{line}\n")

    def _leave(self, ending: messages.RunEnding) -> NoReturn:
        """End the process from this thread: the other threads may wait in a collective forever."""
        rank = str(self._world.rank)
        if self._world.rank == ending.reporter and ending.code == USER_ERROR_EXIT_CODE:
            _print(f"watchdog: {ending.report}\n")
        elif self._world.local_rank == 0 or rank in ending.killers:
            _print(f"watchdog: rank {rank} ends: {ending.line}\n")
        if ending.code != USER_ERROR_EXIT_CODE:
            self._write_stacks()
        elif self._stacks is not None:
            self._stacks.close()
        for pid, began in ending.killers.get(rank, []):
            kill_process(pid, began, folder=self._folder, why=ending.line)
        if ending.killers:
            # Do not exit at once: a launcher that sees one rank exit may signal the others, which are still killing.
            time.sleep(1.5)
        self._record_cause(ending)
        self._announce_exit(f"left: {ending.line}")
        os._exit(ending.code or RUN_ERROR_EXIT_CODE)

    def _write_stacks(self) -> None:
        if (stacks := self._stacks) is not None and not self._has_written:
            self._has_written = True
            try_to_finish(lambda: stacks.write(self.progress.status()))


def _unset(keys: Mapping[int, str], store: dist.Store) -> list[int]:
    """Ranks whose keys are not set within a minute, at most _MAX_NAMED_RANKS of them."""
    try:
        store.wait(list(keys.values()), _PREPARED_WAIT)
    except dist.DistStoreError:
        return [rank for rank, key in keys.items() if not store.check([key])][:_MAX_NAMED_RANKS]
    return []


@contextmanager
def start_monitor(progress: RankProgress, world: World, store: dist.Store, output_dir: Path) -> Iterator[Monitor]:
    """While open, run this rank's monitor and, on rank zero, the coordinator.

    Every rank opens it, with the store of the process group. RunError where rank zero does not accept this rank.
    """
    pid = os.getpid()
    process = messages.RankProcess(world.rank, socket.gethostname(), pid, began_at(pid), own_pid_namespace())
    coordinator = None
    with _tell_whether_joined(world, store):
        say = lambda line: _print(f"{line}\n")  # noqa: E731
        secret = agree_on_secret(store, world, folder=output_dir, environ=os.environ, say=say)
        if world.rank == 0:
            coordinator = _start_coordinator(process, world, store, secret, output_dir)
        location = decode(store.get(_COORDINATOR_KEY), [messages.CoordinatorLocation], peer="rank 0")
        connection = _join(process, (location.address or world.master_addr, location.port), secret)
    monitor = Monitor(progress, world, connection, location.process, output_dir)
    monitor.start()
    try:
        with monitor.announce_exits(), monitor.report_errors():
            if world.rank == 0:
                _check_joined(world, store)
            yield monitor
    finally:
        monitor.close()
        if coordinator is not None:
            # Keep serving while other ranks take longer to leave: they would take this rank for dead.
            coordinator.join()


@contextmanager
def _tell_whether_joined(world: World, store: dist.Store) -> Iterator[None]:
    """Tell rank zero, through the store, that this rank has joined the watchdog, or why it has not."""
    why = "it ended before"
    try:
        yield
        why = ""
    except RunError as refused:
        why = refused.message
        raise
    finally:
        store.set(f"{_JOINED_KEY}/{world.rank}", why)


def _check_joined(world: World, store: dist.Store) -> None:
    """Wait for every rank to join; RunError where one was refused, as without it the run would wait for ever."""
    keys = [f"{_JOINED_KEY}/{rank}" for rank in range(world.world_size)]
    store.wait(keys, _JOIN_WAIT)
    for rank, why in enumerate(store.get(key).decode() for key in keys):
        if why:
            raise RunError(f"rank {rank} has not joined the watchdog of rank 0: {why}", hint=_JOIN_HINT)


def _start_coordinator(
    process: messages.RankProcess, world: World, store: dist.Store, secret: bytes, output_dir: Path
) -> Coordinator:
    address = coordinator_address(world, os.environ)
    listener = listen(address)
    coordinator = Coordinator(listener, secret, world.world_size, output_dir)
    coordinator.start()
    location = messages.CoordinatorLocation(address, listener.getsockname()[1], process)
    store.set(_COORDINATOR_KEY, encode(location).decode())
    return coordinator


def _join(process: messages.RankProcess, address: tuple[str, int], secret: bytes) -> Connection:
    """Connect to the coordinator until it accepts this rank; RunError where it does not."""
    why = ""
    for _ in range(_CONNECT_TRIES):
        try:
            connection = Connection.open(*address, secret, timeout=_CONNECT_SECONDS)
        except OSError as error:
            why = str(error)
            continue
        if not connection.is_lost:
            connection.send(process)
            why = _why_refused(connection)
            if not why:
                return connection
        connection.close()
    raise RunError(
        f"rank {process.rank} is not accepted by the watchdog of rank 0 at {address[0]}:{address[1]}: {why}",
        hint=_JOIN_HINT,
    )


def _why_refused(connection: Connection) -> str:
    until = time.monotonic() + _CONNECT_SECONDS
    while not connection.is_lost and time.monotonic() < until:
        for message in connection.receive() if wait_readable([connection], 1.0) else []:
            if isinstance(message, messages.RankAccepted):
                return ""
            return message.why if isinstance(message, messages.RankRefused) else message.kind
    return "its secret is another" if connection.is_lost else f"no answer within {_CONNECT_SECONDS:.0f} s"


def _print(text: str) -> None:
    """Write to the file descriptor of standard error: the training thread may hold the lock of `sys.stderr`."""
    # A full disk or a closed pipe must not end this thread, because it has to end the run.
    with suppress(OSError):
        os.write(_STDERR, text.encode())
