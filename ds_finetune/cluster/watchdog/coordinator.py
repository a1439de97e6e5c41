"""Rank zero's side of the watchdog: a thread that is connected to each rank, detects dead ranks and ends the run.

Each rank detects its own hang (monitor.py) and reports it here; the coordinator then asks all ranks for their status.
"""

import contextlib
import math
import resource
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from ds_finetune.cluster.watchdog import kills, messages
from ds_finetune.cluster.watchdog.connection import CLOSED, UNREACHABLE, UNREACHABLE_SECONDS, Connection, wait_readable
from ds_finetune.cluster.watchdog.diagnosis import diagnose, hosts_text, status_lines
from ds_finetune.cluster.watchdog.progress import RankStatus
from ds_finetune.errors import RUN_ERROR_EXIT_CODE, USER_ERROR_EXIT_CODE
from ds_finetune.runs.status import mark_ended, try_to_finish, try_to_read
from ds_finetune.system.process_messages import ProcessMessage
from ds_finetune.system.processes import PauseDetector
from ds_finetune.system.whole_file import replace_file

REPORT = "report.txt"
SECONDARY_ERROR_SECONDS = 2.0
"""How long the coordinator waits for the original error after one that may only be a consequence of it."""
STATUS_SECONDS = 5.0
"""How long ranks have to answer a status request."""
LEAVING_SECONDS = 15.0
"""How long the coordinator keeps serving after it has ended the run."""
UNIDENTIFIED_SECONDS = 10.0
"""How long a connection may take to show that it knows the secret."""
_SPARE_CONNECTIONS = 128
_TICK_SECONDS = 0.2


@dataclass
class StatusRound:
    """A request for the status of every rank: why it was made, until when ranks may answer, and their answers."""

    why: str
    until: float
    failure: messages.FailureReport | None = None
    statuses: dict[int, RankStatus] = field(default_factory=dict)


class Coordinator(threading.Thread):
    """Serves `size` ranks that know `secret`, until each has left or some seconds after the end of the run."""

    def __init__(self, listener: socket.socket, secret: bytes, size: int, output_dir: Path) -> None:
        super().__init__(name="watchdog-coordinator", daemon=True)
        self._listener = listener
        self._secret = secret
        self._size = size
        self._folder = output_dir / kills.FOLDER
        self._unidentified: list[Connection] = []
        # A process may open a limited number of files, and the run needs most of them.
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_unidentified = min(size + _SPARE_CONNECTIONS, most_files // 4)
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, messages.RankProcess] = {}
        self._left: set[int] = set()
        self._cut_off: dict[int, float] = {}
        self._secondary_failures: dict[int, tuple[messages.FailureReport, float]] = {}
        self._status_round: StatusRound | None = None
        self._ended_at = math.inf
        self._ending: messages.RunEnding | None = None
        self._oom_kills = kills.oom_kills()
        self._pauses = PauseDetector()
        self._stacks_bytes = {rank: kills.file_bytes(kills.stacks_path(self._folder, rank)) for rank in range(size)}

    def run(self) -> None:
        """Serve until all ranks have left."""
        try:
            while len(self._left) < self._size and time.monotonic() < self._ended_at + LEAVING_SECONDS:
                self._serve()
        finally:
            self._listener.close()
            for connection in (*self._unidentified, *self._connections.values()):
                connection.close()

    def _serve(self) -> None:
        sources = [self._listener, *self._unidentified, *self._connections.values()]
        readable = wait_readable(sources, _TICK_SECONDS)
        if pause := self._pauses.last_pause():
            self._move_deadlines(pause.monotonic_seconds)
        for source in readable:
            self._read(source)
        self._detect_dead_ranks()
        now = time.monotonic()
        for connection in list(self._unidentified):
            if connection.is_lost or now > connection.opened_at + UNIDENTIFIED_SECONDS:
                self._dismiss(connection)
        self._act_on_time(now)

    def _move_deadlines(self, seconds: float) -> None:
        self._ended_at += seconds
        self._cut_off = {rank: since + seconds for rank, since in self._cut_off.items()}
        failures = self._secondary_failures.items()
        self._secondary_failures = {rank: (failure, until + seconds) for rank, (failure, until) in failures}
        if self._status_round is not None:
            self._status_round.until += seconds
        for connection in self._unidentified:
            connection.opened_at += seconds

    def _detect_dead_ranks(self) -> None:
        """Handle ranks whose connection is lost: the kernel closes it when their process dies (connection.py)."""
        for rank, connection in list(self._connections.items()):
            if connection.is_lost:
                self._handle_dead_rank(rank)

    def _read(self, source: socket.socket | Connection) -> None:
        if isinstance(source, socket.socket):
            self._open_connection()
            return
        for message in source.receive():
            if source.rank is None:
                self._admit(source, message)
            elif source.rank not in self._left:
                self._handle(source.rank, message)

    def _open_connection(self) -> None:
        if len(self._unidentified) >= self._max_unidentified:
            # A rank shows the secret within milliseconds, so the connection that has waited longest is no rank's.
            self._dismiss(self._unidentified[0])
        try:
            connected = self._listener.accept()[0]
            self._unidentified.append(Connection(connected, self._secret, is_coordinator=True))
        except OSError:
            # The process may have no file descriptor left; without a pause this would be tried again at once.
            time.sleep(_TICK_SECONDS)

    def _dismiss(self, connection: Connection) -> None:
        self._unidentified.remove(connection)
        connection.close()

    def _admit(self, connection: Connection, message: ProcessMessage) -> None:
        """Accept or refuse a rank by its first message, whose HMAC proves that it knows the secret."""
        why = self._why_refused(message) if isinstance(message, messages.RankProcess) else "it did not begin with hello"
        if not isinstance(message, messages.RankProcess) or why:
            connection.send(messages.RankRefused(why))
            connection.is_lost = True
            return
        self._unidentified.remove(connection)
        connection.rank = message.rank
        self._connections[message.rank], self._processes[message.rank] = connection, message
        connection.send(messages.RankAccepted())
        if self._ending is not None:
            connection.send(self._ending)

    def _why_refused(self, process: messages.RankProcess) -> str:
        if not 0 <= process.rank < self._size or process.pid < 2:
            return f"rank {process.rank} with process id {process.pid} cannot be one of {self._size} ranks"
        known = self._processes.get(process.rank)
        return f"{known} is already here" if known is not None else ""

    def _handle(self, rank: int, message: ProcessMessage) -> None:
        match message:
            case messages.RankGoodbye():
                self._remove(rank)
            case messages.FailureReport():
                self._handle_failure(rank, message)
            case messages.RankLeaving():
                self._end((rank,), f"{self._processes[rank]} {message.why}", code=RUN_ERROR_EXIT_CODE)
                self._remove(rank)
            case messages.HangReport() if self._status_round is None:
                self._ask_for_status(message.why)
            case RankStatus() if self._status_round is not None:
                self._status_round.statuses[rank] = message

    def _remove(self, rank: int) -> None:
        self._left.add(rank)
        self._connections.pop(rank).close()

    def _handle_dead_rank(self, rank: int) -> None:
        """End the run because a rank's connection is lost; wait for more losses where the network may be at fault."""
        why = self._connections[rank].why_lost
        self._remove(rank)
        if self._ending is not None:
            return
        if rank in self._secondary_failures:
            # It has reported an error that may only be a consequence of another rank's exit.
            return
        if why == UNREACHABLE:
            self._cut_off[rank] = time.monotonic()
            return
        self._end((rank,), f"{self._processes[rank]} {self._why_dead(rank, why)}", code=RUN_ERROR_EXIT_CODE)

    def _why_dead(self, rank: int, why: str) -> str:
        """The cause of death of a rank that reported none; lack of memory only where the kernel has counted a kill."""
        process = self._processes[rank]
        if killed := try_to_read(lambda: kills.why_killed(self._folder, process.pid, process.began), ""):
            return f"was ended by the watchdog: {killed}"
        stacks, after = kills.stacks_path(self._folder, rank), self._stacks_bytes[rank]
        if try_to_read(lambda: kills.was_ended_by_timer(stacks, after), False):
            return "was ended by its own watchdog, because native code held Python's lock beyond the limit"
        count = kills.oom_kills() - self._oom_kills
        is_beside = 0 in self._processes and process.pid_namespace == self._processes[0].pid_namespace
        if why == CLOSED and is_beside and count > 0:
            return f"{why}; the kernel has killed {count} processes of its machine for lack of memory since the start"
        return why

    def _handle_failure(self, rank: int, failure: messages.FailureReport) -> None:
        if failure.is_secondary:
            self._secondary_failures.setdefault(rank, (failure, time.monotonic() + SECONDARY_ERROR_SECONDS))
            return
        line = f"{self._processes[rank]} was the first to fail: {failure.line}"
        self._end((rank,), line, failure.text, code=failure.code)

    def _ask_for_status(self, why: str, failure: messages.FailureReport | None = None) -> None:
        self._status_round = StatusRound(why, time.monotonic() + STATUS_SECONDS, failure)
        for connection in self._connections.values():
            connection.send(messages.StatusRequest())

    def _act_on_time(self, now: float) -> None:
        """Do what is due: conclude a status round, or end the run for ranks that are cut off or have failed."""
        if self._ended_at < math.inf:
            return
        if self._status_round is not None:
            if not self._unanswered(self._status_round) or now > self._status_round.until:
                self._conclude(self._status_round)
        elif self._cut_off and now > min(self._cut_off.values()) + SECONDARY_ERROR_SECONDS:
            self._end_cut_off()
        elif self._secondary_failures:
            rank, (failure, until) = next(iter(self._secondary_failures.items()))
            if now > until:
                self._ask_for_status(f"{self._processes[rank]} met {failure.line}", failure)

    def _unanswered(self, status_round: StatusRound) -> list[int]:
        gone = self._left - self._cut_off.keys()
        return [rank for rank in range(self._size) if rank not in gone and rank not in status_round.statuses]

    def _conclude(self, status_round: StatusRound) -> None:
        unanswered = self._unanswered(status_round)
        lossy = self._cut_off.keys() | {rank for rank, each in self._connections.items() if each.is_unanswered}
        cut_off = [rank for rank in unanswered if rank in lossy]
        statuses: dict[int, RankStatus | None] = dict.fromkeys(unanswered)
        # A rank with a secondary error was in its last collective when that failed.
        statuses |= {
            rank: replace(status, inside=status.last) if rank in self._secondary_failures else status
            for rank, status in status_round.statuses.items()
        }
        diagnosis = diagnose(dict(sorted(statuses.items())), cut_off=cut_off)
        at_fault, why, failure = diagnosis.at_fault, diagnosis.why, status_round.failure
        who = ", ".join(str(self._processes.get(rank, f"rank {rank}")) for rank in at_fault) or "no single rank"
        if failure is not None and not at_fault:
            why = f"{why}; the connection between ranks broke, so the network is at fault: {failure.line}"
        lines = [status_round.why, *status_lines(self._processes, statuses, diagnosis)]
        if failure is not None:
            lines.append(failure.text)
        lines.append(f"  stacks: {self._folder}/rank-*.txt")
        silent = [rank for rank in at_fault if statuses[rank] is None and rank not in cut_off]
        self._end(at_fault, f"{who}: {why}", "\n".join(lines), code=RUN_ERROR_EXIT_CODE, silent=silent)

    def _end_cut_off(self) -> None:
        """End the run because connections timed out. If all other hosts are cut off, this host is the likely cause."""
        ranks = sorted(self._cut_off)
        host = self._processes[0].host if 0 in self._processes else socket.gethostname()
        elsewhere = {process.host for process in self._processes.values()} - {host}
        gone = {self._processes[rank].host for rank in ranks}
        who = hosts_text([self._processes[rank] for rank in ranks])
        if len(elsewhere) > 1 and gone == elsewhere:
            line = (
                f"rank 0 (host {host}) reaches none of the other {len(elsewhere)} hosts over the network; "
                "its own connection is the likely cause"
            )
            self._end((0,), line, f"  not reached: {who}", code=RUN_ERROR_EXIT_CODE)
            return
        self._end(tuple(ranks), f"{who} {UNREACHABLE}, as seen from rank 0 (host {host})", code=RUN_ERROR_EXIT_CODE)

    def _end(
        self, at_fault: tuple[int, ...], line: str, text: str = "", *, code: int, silent: list[int] | None = None
    ) -> None:
        """End the run. After a hang, `silent` are the ranks that do not answer; ranks on their machines kill them."""
        if self._ended_at < math.inf:
            return
        self._ended_at = time.monotonic()
        answering = [rank for rank in self._connections if rank not in (silent or [])]
        self._ending = ending = messages.RunEnding(
            at_fault,
            line,
            report=f"{line}\n{text}".rstrip(),
            code=code,
            reporter=min(answering, default=0),
            is_hang=silent is not None,
            killers=self._killers(silent or [], answering),
        )
        # Rank zero is told last, because this thread ends with its process.
        for rank in sorted(self._connections, reverse=True):
            if rank == 0:
                is_hang = ending.is_hang and (self._status_round is None or self._status_round.failure is None)
                mark_ended(self._folder.parent, "hung" if is_hang else "failed", line)
            if rank == 0 and code != USER_ERROR_EXIT_CODE:
                try_to_finish(lambda: self._write_report(ending.report))
            if rank == 0 and not at_fault:
                # Where packets are lost, the others would see this process gone before they know why.
                for other in self._connections.values():
                    other.wait_until_received(self._ended_at + UNREACHABLE_SECONDS)
            self._connections[rank].send(ending)

    def _killers(self, silent: list[int], answering: list[int]) -> dict[str, list[tuple[int, str]]]:
        """The ranks that kill silent ones: for each silent rank, the lowest answering one that sees its process id."""
        killers: dict[str, list[tuple[int, str]]] = {}
        for process in (self._processes[rank] for rank in silent if rank in self._processes):
            beside = [rank for rank in answering if self._processes[rank].pid_namespace == process.pid_namespace]
            if beside and process.pid_namespace:
                killers.setdefault(str(min(beside)), []).append((process.pid, process.began))
        return killers

    def _write_report(self, report: str) -> None:
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / REPORT, report + "\n")
