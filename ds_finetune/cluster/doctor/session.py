"""A session with a program on a host: one started Python process answers many requests.

The lines of its replies begin with a token, so that the output of a login shell is not mistaken for a reply.
"""

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from ds_finetune.cluster.doctor.messages import RequestRefused
from ds_finetune.errors import FinetuneError
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
Reply = TypeVar("Reply", bound=ProcessMessage)


@dataclass(frozen=True)
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
