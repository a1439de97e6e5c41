"""Rank zero's side: every rank has a line to it; what ends one of them ends all."""

import contextlib
import math
import resource
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from ds_finetune.errors import RUN_ERROR_EXIT_CODE, USER_ERROR_EXIT_CODE
from ds_finetune.watchdog.connection import CLOSED, MALFORMED, UNREACHABLE, Connection, Message, parsed, waiting
from ds_finetune.watchdog.diagnosis import diagnose
from ds_finetune.watchdog.process_death import FOLDER, oom_kills, size_of, stacks_path, was_held, why_killed
from ds_finetune.watchdog.progress import RankStatus
from ds_finetune.watchdog.report import FailureReport, RankProcess, RunEnding, hosts_text, status_lines

REPORT = "report.txt"
ECHO_SECONDS = 2.0
"""How long an error that may follow from another rank's end waits for word of that one."""
ANSWER_SECONDS = 5.0
"""How long ranks have to say where they stand."""
LOSSY_SECONDS = 15.0
"""How much longer they have where packets are lost, which the kernel sends again at growing intervals."""
LEAVING_SECONDS = 15.0
"""How long the hub stays once the run is ending."""
STRANGER_SECONDS = 10.0
"""How long a connection may take to show that it knows the secret."""
_SPARE_STRANGERS = 128
_TICK_SECONDS = 0.2


@dataclass
class StatusRound:
    """Every rank was asked where it stands: why, until when they may answer, and what came."""

    why: str
    until: float
    failure: FailureReport | None = None
    answers: dict[int, RankStatus] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    """Segments that each connection had lost when its rank was asked."""
    is_extended: bool = False


class Coordinator(threading.Thread):
    """Listens to `size` ranks that know `secret`; ends when each has said goodbye, or soon after it has ended the
    run.
    """

    def __init__(self, listener: socket.socket, secret: bytes, size: int, output_dir: Path) -> None:
        super().__init__(name="watchdog-hub", daemon=True)
        self._listener = listener
        self._secret = secret
        self._size = size
        self._folder = output_dir / FOLDER
        self._strangers: list[Connection] = []
        # Files of this process have a limit, of which the run needs most.
        self._most_strangers = min(size + _SPARE_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._links: dict[int, Connection] = {}
        self._members: dict[int, RankProcess] = {}
        self._left: set[int] = set()
        self._cut_off: dict[int, float] = {}
        self._echoes: dict[int, tuple[FailureReport, float]] = {}
        self._inquiry: StatusRound | None = None
        self._ended_at = math.inf
        self._ending: RunEnding | None = None
        self._oom_kills = oom_kills()
        self._stacks_before = {rank: size_of(stacks_path(self._folder, rank)) for rank in range(size)}

    def run(self) -> None:
        """Until all have left."""
        try:
            while len(self._left) < self._size and time.monotonic() < self._ended_at + LEAVING_SECONDS:
                self._serve()
        finally:
            self._listener.close()
            for link in (*self._strangers, *self._links.values()):
                link.close()

    def _serve(self) -> None:
        for each in waiting([self._listener, *self._strangers, *self._links.values()], _TICK_SECONDS):
            self._take(each)
        for rank, link in list(self._links.items()):
            if link.is_lost:
                self._lose(rank)
        now = time.monotonic()
        for link in [link for link in self._strangers if link.is_lost or now > link.opened_at + STRANGER_SECONDS]:
            self._dismiss(link)
        self._look_at_clock(now)

    def _take(self, source: socket.socket | Connection) -> None:
        if isinstance(source, socket.socket):
            self._accept()
            return
        for message in source.received():
            if source.peer is None:
                self._greet(source, message)
            elif source.peer not in self._left:
                self._hear(source.peer, message)

    def _accept(self) -> None:
        if len(self._strangers) >= self._most_strangers:
            # A rank shows the secret within milliseconds; what has waited longest is none.
            self._dismiss(self._strangers[0])
        try:
            self._strangers.append(Connection(self._listener.accept()[0], self._secret, is_hub=True))
        except OSError:
            # Without a file to spare it would be tried again at once.
            time.sleep(_TICK_SECONDS)

    def _dismiss(self, link: Connection) -> None:
        self._strangers.remove(link)
        link.close()

    def _greet(self, link: Connection, message: Message) -> None:
        """The first message of a connection, which has shown the secret."""
        try:
            member = parsed(RankProcess, message.get("member"))
            why = self._why_refused(member)
        except ValueError:
            why = "what it says of itself cannot be read"
        if message["kind"] != "hello" or why:
            link.send({"kind": "refused", "why": why or "it did not begin with hello"})
            link.is_lost = True
            return
        self._strangers.remove(link)
        link.peer, self._links[member.rank], self._members[member.rank] = member.rank, link, member
        link.send({"kind": "welcome"})
        if self._ending is not None:
            link.send({"kind": "end", "ending": self._ending.as_json()})

    def _why_refused(self, member: RankProcess) -> str:
        if not 0 <= member.rank < self._size or member.pid < 2:
            return f"rank {member.rank} with process id {member.pid} cannot be one of {self._size} ranks"
        known = self._members.get(member.rank)
        return f"{known} is already here" if known is not None else ""

    def _hear(self, rank: int, message: Message) -> None:
        try:
            self._obey(rank, message)
        except ValueError:
            self._links[rank].is_lost, self._links[rank].why = True, MALFORMED

    def _obey(self, rank: int, message: Message) -> None:
        """Do what a message of `rank` says; ValueError where that cannot be read."""
        match message["kind"]:
            case "bye":
                self._leave(rank)
            case "failed":
                self._fail(rank, parsed(FailureReport, message.get("failure")))
            case "leaving":
                self._end((rank,), f"{self._members[rank]} {parsed(str, message.get('why'))}", code=RUN_ERROR_EXIT_CODE)
                self._leave(rank)
            case "still" if self._inquiry is None:
                self._inquire(parsed(str, message.get("why")))
            case "answer" if self._inquiry is not None:
                self._inquiry.answers[rank] = parsed(RankStatus, message.get("answer"))

    def _leave(self, rank: int) -> None:
        self._left.add(rank)
        self._links.pop(rank).close()

    def _lose(self, rank: int) -> None:
        why = self._links[rank].why
        self._leave(rank)
        if rank in self._echoes:
            # It has stated its reason, which is not its own end.
            return
        if why == UNREACHABLE:
            self._cut_off[rank] = time.monotonic()
            return
        self._end((rank,), f"{self._members[rank]} {self._why_closed(rank, why)}", code=RUN_ERROR_EXIT_CODE)

    def _why_closed(self, rank: int, why: str) -> str:
        """What is known of the end of a rank that stated no reason; memory only where the kernel has counted such an
        end.
        """
        member = self._members[rank]
        if killed := why_killed(self._folder, member.pid, member.began):
            return f"was ended by the watchdog: {killed}"
        if was_held(stacks_path(self._folder, rank), self._stacks_before[rank]):
            return "was ended by its own watchdog, because native code held Python's lock beyond the limit"
        count = oom_kills() - self._oom_kills
        is_beside = 0 in self._members and member.place == self._members[0].place
        if why == CLOSED and is_beside and count > 0:
            return (
                f"{why}; the kernel has ended {count} processes of its machine for want of memory since the run began"
            )
        return why

    def _fail(self, rank: int, failure: FailureReport) -> None:
        if failure.is_secondary:
            self._echoes.setdefault(rank, (failure, time.monotonic() + ECHO_SECONDS))
            return
        self._end(
            (rank,), f"{self._members[rank]} was the first to fail: {failure.line}", failure.text, code=failure.code
        )

    def _inquire(self, why: str, failure: FailureReport | None = None) -> None:
        lost = {rank: link.loss().lost for rank, link in self._links.items()}
        self._inquiry = StatusRound(why, time.monotonic() + ANSWER_SECONDS, failure, lost=lost)
        self._tell({"kind": "ask"})

    def _look_at_clock(self, now: float) -> None:
        if self._ended_at < math.inf:
            return
        if self._inquiry is not None:
            if not self._unanswered(self._inquiry) or now > self._inquiry.until:
                self._conclude_or_wait(self._inquiry)
        elif self._cut_off and now > min(self._cut_off.values()) + ECHO_SECONDS:
            self._end_cut_off()
        elif self._echoes:
            rank, (failure, until) = next(iter(self._echoes.items()))
            if now > until:
                self._inquire(f"{self._members[rank]} met {failure.line}", failure)

    def _unanswered(self, inquiry: StatusRound) -> list[int]:
        """Ranks that are expected to answer and have not."""
        gone = self._left - self._cut_off.keys()
        return [rank for rank in range(self._size) if rank not in gone and rank not in inquiry.answers]

    def _conclude_or_wait(self, inquiry: StatusRound) -> None:
        silent = self._unanswered(inquiry)
        lossy = [
            rank for rank in silent if rank in self._cut_off or (rank in self._links and self._is_lossy(rank, inquiry))
        ]
        if any(rank in self._links for rank in lossy) and not inquiry.is_extended:
            inquiry.until, inquiry.is_extended = inquiry.until + LOSSY_SECONDS, True
            self._tell({"kind": "wait"})
            return
        self._conclude(inquiry, lossy)

    def _is_lossy(self, rank: int, inquiry: StatusRound) -> bool:
        loss = self._links[rank].loss()
        return loss.unacknowledged > 0 or loss.lost > inquiry.lost.get(rank, 0)

    def _conclude(self, inquiry: StatusRound, cut_off: list[int]) -> None:
        answers: dict[int, RankStatus | None] = dict.fromkeys(self._unanswered(inquiry))
        # A rank that met an error of another one's end was in the collective that failed.
        answers |= {
            rank: replace(each, inside=each.last) if rank in self._echoes else each
            for rank, each in inquiry.answers.items()
        }
        found = diagnose(dict(sorted(answers.items())), cut_off=cut_off)
        who = ", ".join(str(self._members.get(rank, f"rank {rank}")) for rank in found.at_fault) or "no single rank"
        why = found.why
        if inquiry.failure is not None and not found.at_fault:
            why = f"{found.why}; the connection between ranks broke, so the network is at fault: {inquiry.failure.line}"
        lines = [inquiry.why, *status_lines(self._members, answers, found)]
        if inquiry.failure is not None:
            lines.append(inquiry.failure.text)
        lines.append(f"  stacks: {self._folder}/rank-*.txt")
        silent = [rank for rank in found.at_fault if answers[rank] is None and rank not in cut_off]
        self._end(found.at_fault, f"{who}: {why}", "\n".join(lines), code=RUN_ERROR_EXIT_CODE, silent=silent)

    def _end_cut_off(self) -> None:
        """Ranks whose connection timed out. Either end may be at fault, and where all others are gone it is this
        one.
        """
        ranks = sorted(self._cut_off)
        host = self._members[0].host if 0 in self._members else socket.gethostname()
        elsewhere = {member.host for member in self._members.values()} - {host}
        gone = {self._members[rank].host for rank in ranks}
        who = hosts_text([self._members[rank] for rank in ranks])
        if len(elsewhere) > 1 and gone == elsewhere:
            line = (
                f"rank 0 (host {host}) reaches none of the other {len(elsewhere)} hosts over the network; "
                "its own connection is the likely cause"
            )
            self._end((0,), line, f"  not reached: {who}", code=RUN_ERROR_EXIT_CODE)
            return
        self._end(tuple(ranks), f"{who} {UNREACHABLE}, as seen from rank 0 (host {host})", code=RUN_ERROR_EXIT_CODE)

    def _end(
        self, first: tuple[int, ...], line: str, text: str = "", *, code: int, silent: list[int] | None = None
    ) -> None:
        """End the run; `silent` ranks, which do not answer, are ended by others."""
        if self._ended_at < math.inf:
            return
        self._ended_at = time.monotonic()
        there = [rank for rank in self._links if rank not in (silent or [])]
        report = f"{line}\n{text}".rstrip()
        ends = self._ends(silent or [], there)
        self._ending = ending = RunEnding(first, line, report, code, min(there, default=0), silent is not None, ends)
        # Rank zero, in whose process this runs, is told last.
        for rank in sorted(self._links, reverse=True):
            if rank == 0 and code != USER_ERROR_EXIT_CODE:
                self._write(ending.report)
            self._links[rank].send({"kind": "end", "ending": ending.as_json()})

    def _ends(self, silent: list[int], there: list[int]) -> dict[str, list[tuple[int, str]]]:
        """Which ranks end the silent ones: the first beside each that sees its process id."""
        found: dict[str, list[tuple[int, str]]] = {}
        for member in (self._members[rank] for rank in silent if rank in self._members):
            beside = [rank for rank in there if self._members[rank].place == member.place]
            if beside and member.place:
                found.setdefault(str(min(beside)), []).append((member.pid, member.began))
        return found

    def _tell(self, message: Message) -> None:
        for link in self._links.values():
            link.send(message)

    def _write(self, report: str) -> None:
        """The report under its name only once it is whole, since others wait for the file."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = self._folder / f".{REPORT}.partial"
            partial.write_text(report + "\n", encoding="utf-8")
            partial.replace(self._folder / REPORT)
