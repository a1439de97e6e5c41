"""Sessions with a program on a host: one started Python process answers many requests.

The lines of its replies begin with a token, so that the output of a login shell is not mistaken for a reply.
A `Cluster` has a session with a probe (probe.py) on every host, and sends requests to all of them in parallel.
"""

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import IO, Any, Self, TypeVar

from ds_finetune.cluster.doctor.checks import ClockOffset
from ds_finetune.cluster.doctor.messages import REPLIES, RequestRefused, TimeReply, TimeRequest
from ds_finetune.cluster.host_checks import Check, label, other_program_check, unreachable_check
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import FinetuneError, LaunchError
from ds_finetune.system.process_messages import (
    LineBuffer,
    MessageError,
    MessageReader,
    ProcessMessage,
    decode,
    encode,
    send,
)

_TAIL_BYTES = 20_000
_END_SECONDS = 5.0
_READ_BYTES = 2**16
_PEER = "the program that asks"
_NOTICE_SECONDS = 15.0
_PINGS = 5
_PING_SECONDS = 10.0
PROBE = "ds_finetune.cluster.doctor.probe"
"""The module that answers on each host."""
Reply = TypeVar("Reply", bound=ProcessMessage)
Result = TypeVar("Result")


class OpenSession(ProcessMessage, kind="open-session"):
    """The first message of the requesting side: the token with which replies begin."""

    token: str


class HostLostError(Exception):
    """The other side ended (`code`), or did not answer in time (`code` None); `stderr` is the end of its output."""

    def __init__(self, code: int | None, stderr: str) -> None:
        super().__init__(f"exit code {code}: {stderr}")
        self.code, self.stderr = code, stderr


class RefusedError(Exception):
    """The other side answered with a FinetuneError: its message and hint."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class Session:
    """The requesting side of a session with `peer`, which may reply with messages of the types `replies`.

    `start` gets a file for standard error, and returns a process with pipes for standard input and output.
    """

    def __init__(
        self,
        start: Callable[[IO[bytes]], "subprocess.Popen[bytes]"],
        replies: Sequence[type[ProcessMessage]],
        *,
        peer: str,
    ) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.process = start(self._stderr)
        token = secrets.token_hex(8)
        assert self.process.stdout
        types: tuple[type[ProcessMessage], ...] = (*replies, RequestRefused)
        self._reader = MessageReader(self.process.stdout.fileno(), types, peer=peer, token=token)
        self.send(OpenSession(token))

    def ask(self, request: ProcessMessage, reply: type[Reply], *, seconds: float) -> Reply:
        """The reply to one request.

        HostLostError without a reply after `seconds` at most, RefusedError for a FinetuneError of the other side, and
        MessageError for a reply that cannot be read or is of another type.
        """
        self.send(request)
        return self.receive(reply, seconds=seconds)

    def send(self, request: ProcessMessage) -> None:
        """Send a request; `receive` notices a side that has ended."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.write(encode(request))
            self.process.stdin.flush()

    def receive(self, reply: type[Reply], *, seconds: float) -> Reply:
        """The reply to the oldest request that has none yet; the errors of `ask`."""
        message = self._reader.next(seconds)
        if isinstance(message, RequestRefused):
            raise RefusedError(message.message, message.hint)
        if isinstance(message, reply):
            return message
        if message is not None:
            raise MessageError(self._reader.peer, f"it is a {message.kind}, expected {reply.kind}")
        raise HostLostError(self.process.wait() if self._reader.is_closed else None, self.stderr())

    def stderr(self) -> str:
        """The end of what the other side, or ssh, wrote to standard error."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _TAIL_BYTES))
        return self._stderr.read().decode(errors="replace").strip()

    def end(self) -> None:
        """Close the session, which ends the other side; kill its process if it still runs after some seconds."""
        assert self.process.stdin
        assert self.process.stdout
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._stderr.close()


Handlers = Mapping[type[ProcessMessage], Callable[[Any], ProcessMessage]]


def answer_requests(handlers: Handlers, *, seconds: int, at_end: Callable[[], None] = lambda: None) -> None:
    """The answering side: reply to each request on standard input until input ends; then `at_end`.

    The process and its children end when the input ends, and after `seconds` in any case. Output of
    libraries goes to standard error. A FinetuneError is a reply; another exception ends the process, and the
    requesting side gets its text.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()
    signal.alarm(seconds)
    output = os.dup(1)
    os.dup2(2, 1)
    # Start a new line: a login shell may have printed text without a newline.
    os.write(output, b"\n")
    lines: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read_lines, args=(lines, at_end), daemon=True).start()
    token = decode(lines.get(), [OpenSession], peer=_PEER).token
    while True:
        request = decode(lines.get(), list(handlers), peer=_PEER)
        try:
            reply = handlers[type(request)](request)
        except FinetuneError as error:
            reply = RequestRefused(error.message, error.hint)
        send(output, reply, token=token)


def _read_lines(lines: "queue.Queue[bytes]", at_end: Callable[[], None]) -> None:
    # Not sys.stdin: a reading thread holds its lock, and an interpreter that ends meanwhile aborts.
    buffer = LineBuffer(peer=_PEER)
    while piece := os.read(0, _READ_BYTES):
        for line in buffer.feed(piece):
            lines.put(line)
    at_end()
    # The group holds compilers that the build of an operator has started.
    os.killpg(os.getpgrp(), signal.SIGKILL)


class Cluster:
    """Runs a probe on each host while in `with`; `lost` has the failed checks of hosts that stopped answering."""

    def __init__(self, hosts: Sequence[Host], remote: Remote, say: Say) -> None:
        self.hosts, self.remote, self.say = {label(host): host for host in hosts}, remote, say
        self.sessions: dict[str, Session] = {}
        self.lost: list[Check] = []

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(max_workers=len(self.hosts))
        try:
            for name, host in self.hosts.items():
                self.sessions[name] = self._session(host)
        except FileNotFoundError as absent:
            raise LaunchError(
                f"`{absent.filename}` is not installed here", hint="install it (Debian: openssh-client)"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        # Not in the pool: after an interrupt all its threads may still wait for replies.
        with ThreadPoolExecutor(max_workers=len(self.hosts)) as ending:
            list(ending.map(Session.end, self.sessions.values()))
        self._pool.shutdown()

    def ask(
        self, requests: Mapping[str, ProcessMessage], reply: type[Reply], *, seconds: float, what: str = ""
    ) -> dict[str, Reply]:
        """Send each host in `requests` its request, and return the replies by host.

        A host without a reply after `seconds` is lost. `what` describes long work, for the notice printed meanwhile.
        """
        sessions = {name: self.sessions[name] for name in requests if name in self.sessions}
        pending = {
            self._pool.submit(session.ask, requests[name], reply, seconds=seconds): name
            for name, session in sessions.items()
        }
        self._wait(pending, what)
        return self._results(pending)

    def clocks(self) -> dict[str, ClockOffset]:
        """The offset of each host's clock from this machine's, measured by the quickest of a few requests."""
        pending = {self._pool.submit(_clock_offset, session): name for name, session in self.sessions.items()}
        wait(pending)
        return self._results(pending)

    def _session(self, host: Host) -> Session:
        peer = f"the probe of {label(host)}"
        return Session(lambda stderr: self.remote.open(host, PROBE, stderr=stderr), REPLIES, peer=peer)

    def _wait(self, pending: "Mapping[Future[Any], str]", what: str) -> None:
        left = set(pending)
        while left:
            left = wait(left, timeout=_NOTICE_SECONDS).not_done
            if left and what:
                self.say(f"waiting for {', '.join(sorted(pending[future] for future in left))}: {what}")

    def _results(self, pending: "Mapping[Future[Result], str]") -> dict[str, Result]:
        results = {}
        for future, name in pending.items():
            try:
                results[name] = future.result()
            except HostLostError as lost:
                self._lose(name, unreachable_check(name, lost.code, lost.stderr, self.remote.python))
            except RefusedError as refused:
                self._lose(name, Check("probe", name, "fail", refused.message, refused.hint))
            except MessageError:
                self._lose(name, other_program_check(name))
        return results

    def _lose(self, name: str, check: Check) -> None:
        self.lost.append(check)
        self.sessions.pop(name).end()


def _clock_offset(session: Session) -> ClockOffset:
    offsets = []
    for _ in range(_PINGS):
        began = time.time()
        there = session.ask(TimeRequest(), TimeReply, seconds=_PING_SECONDS).seconds
        ended = time.time()
        offsets.append(ClockOffset(there - (began + ended) / 2, ended - began))
    return min(offsets, key=lambda offset: offset.round_trip)
