"""Rank zero's side: every rank has a line to it; what ends one of them ends all."""

import contextlib
import hmac
import math
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from ds_finetune.errors import RUN_ERROR_EXIT_CODE, USER_ERROR_EXIT_CODE
from ds_finetune.watch.board import Answer
from ds_finetune.watch.report import Ending, Failure, Member, still_lines
from ds_finetune.watch.stacks import FOLDER
from ds_finetune.watch.verdict import verdict
from ds_finetune.watch.wire import LONGEST_LINE, Link, Message, waiting

REPORT = "report.txt"
ECHO_SECONDS = 2.0
"""How long an error that may follow from another rank's end waits for word of that one."""
ANSWER_SECONDS = 5.0
"""How long ranks have to say where they stand."""
_GREETING_BYTES = 4096
"""Of what a stranger may send before it has shown the token."""
LEAVING_SECONDS = 15.0
"""How long the hub stays once the run is ending."""
_TICK_SECONDS = 0.2


@dataclass
class Inquiry:
    """Every rank was asked where it stands: why, until when they may answer, and what came."""

    why: str
    until: float
    failure: Failure | None = None
    answers: dict[int, Answer] = field(default_factory=dict)


class Hub(threading.Thread):
    """Listens to `size` ranks that know `token`; ends when each has said goodbye, or a little after it has ended the run."""

    def __init__(self, listener: socket.socket, token: str, size: int, output_dir: Path) -> None:
        super().__init__(name="watchdog-hub", daemon=True)
        self._listener = listener
        self._token = token
        self._size = size
        self._folder = output_dir / FOLDER
        self._strangers: list[Link] = []
        self._links: dict[int, Link] = {}
        self._members: dict[int, Member] = {}
        self._left: set[int] = set()
        self._echo: tuple[int, Failure, float] | None = None
        self._inquiry: Inquiry | None = None
        self._ended_at = math.inf
        self._ending: Ending | None = None

    def run(self) -> None:
        """Until all have left."""
        while len(self._left) < self._size and time.monotonic() < self._ended_at + LEAVING_SECONDS:
            for each in waiting([self._listener, *self._strangers, *self._links.values()], _TICK_SECONDS):
                self._take(each)
            for rank, link in list(self._links.items()):
                if link.is_lost:
                    self._lose(rank)
            self._look_at_clock(time.monotonic())
        self._listener.close()
        for link in (*self._strangers, *self._links.values()):
            link.close()

    def _take(self, source: socket.socket | Link) -> None:
        if isinstance(source, socket.socket):
            with contextlib.suppress(OSError):
                self._strangers.append(Link(source.accept()[0], longest=_GREETING_BYTES))
            return
        for message in source.received():
            if source.peer is None:
                self._greet(source, message)
            else:
                self._hear(source.peer, message)
        if source.peer is None and source.is_lost:
            self._strangers.remove(source)
            source.close()

    def _greet(self, link: Link, message: Message) -> None:
        if not hmac.compare_digest(str(message.get("token", "")).encode(), self._token.encode()):
            link.is_lost = True
            return
        member = Member(**message["member"])
        self._strangers.remove(link)
        link.longest = LONGEST_LINE
        link.peer, self._links[member.rank], self._members[member.rank] = member.rank, link, member
        if self._ending is not None:
            link.send({"kind": "end", "ending": self._ending.as_json()})

    def _hear(self, rank: int, message: Message) -> None:
        if message["kind"] == "bye":
            self._leave(rank)
        elif message["kind"] == "failed":
            self._fail(rank, Failure(**message["failure"]))
        elif message["kind"] == "still" and self._inquiry is None:
            self._inquire(message["why"])
        elif message["kind"] == "answer" and self._inquiry is not None:
            self._inquiry.answers[rank] = Answer.from_json(message["answer"])

    def _leave(self, rank: int) -> None:
        self._left.add(rank)
        self._links.pop(rank).close()

    def _lose(self, rank: int) -> None:
        why = self._links[rank].why
        self._leave(rank)
        self._end((rank,), f"{self._members[rank]} {why}", code=RUN_ERROR_EXIT_CODE)

    def _fail(self, rank: int, failure: Failure) -> None:
        if failure.is_echo:
            self._echo = self._echo or (rank, failure, time.monotonic() + ECHO_SECONDS)
            return
        self._end((rank,), f"{self._members[rank]} was the first to fail: {failure.line}", failure.text, code=failure.code)

    def _inquire(self, why: str, failure: Failure | None = None) -> None:
        self._inquiry = Inquiry(why, time.monotonic() + ANSWER_SECONDS, failure)
        self._tell({"kind": "ask"})

    def _look_at_clock(self, now: float) -> None:
        if self._ended_at < math.inf:
            return
        if self._inquiry is not None:
            if len(self._inquiry.answers) == self._size - len(self._left) or now > self._inquiry.until:
                self._conclude(self._inquiry)
        elif self._echo is not None and now > self._echo[2]:
            rank, failure, _ = self._echo
            self._inquire(f"{self._members[rank]} met {failure.line}", failure)

    def _conclude(self, inquiry: Inquiry) -> None:
        answers = {rank: inquiry.answers.get(rank) for rank in range(self._size) if rank not in self._left}
        found = verdict(answers)
        who = ", ".join(str(self._members.get(rank, f"rank {rank}")) for rank in found.odd) or "all ranks"
        lines = [inquiry.why, *still_lines(self._members, answers, found)]
        if inquiry.failure is not None:
            lines.append(inquiry.failure.text)
        lines.append(f"  stacks: {self._folder}/rank-*.txt")
        self._end(found.odd, f"{who}: {found.why}", "\n".join(lines), code=RUN_ERROR_EXIT_CODE, is_still=True)

    def _end(self, first: tuple[int, ...], line: str, text: str = "", *, code: int, is_still: bool = False) -> None:
        if self._ended_at < math.inf:
            return
        self._ended_at = time.monotonic()
        silent = [rank for rank in first if is_still and self._inquiry is not None and rank not in self._inquiry.answers]
        there = [rank for rank in self._links if rank not in silent]
        report = f"{line}\n{text}".rstrip()
        self._ending = ending = Ending(first, line, report, code, min(there, default=0), is_still, self._ends(silent, there))
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
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / REPORT).write_text(report + "\n", encoding="utf-8")
