"""Lines of JSON over TCP, in which the kernel tells of a process that died at once and of a machine that is gone in seconds."""

import contextlib
import errno
import json
import select
import socket
import sys
import threading
import time
from typing import Any

Message = dict[str, Any]

GONE_SECONDS = 12
"""Without an answer from the other machine's kernel for so long a connection is lost; one whose process is stopped or busy is not."""
CLOSED = "ended without a word: killed, or out of memory"
UNREACHABLE = "cannot be reached: its machine or the network is gone"
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_PROBE_SECONDS = 3
_SEND_SECONDS = 2.0
LONGEST_LINE = 2**22
"""Bytes of a message, of many ranks' failures in one."""
_CHUNK = 2**16


class Link:
    """One connection; `is_lost` once the other end is gone, which `why` says more of; `peer` as the hub numbers it."""

    def __init__(self, connection: socket.socket, *, longest: int = LONGEST_LINE) -> None:
        self._socket = connection
        self._buffer = b""
        self._sending = threading.Lock()
        self.is_lost = False
        self.why = CLOSED
        self.peer: int | None = None
        self.longest = longest
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _mind(connection)

    @classmethod
    def to(cls, address: str, port: int, *, timeout: float) -> "Link":
        """Connect; OSError where that cannot be done in `timeout` seconds."""
        return cls(socket.create_connection((address, port), timeout=timeout))

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send, where the other end is still there."""
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError as error:
            self._lose(error)

    def received(self) -> list[Message]:
        """Whole messages that have come; waits where nothing has."""
        try:
            chunk = self._socket.recv(_CHUNK)
        except OSError as error:
            self._lose(error)
            return []
        if not chunk or len(self._buffer) > self.longest:
            self.is_lost = True
            return []
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        try:
            return [message for message in map(json.loads, lines) if isinstance(message, dict)]
        except (ValueError, RecursionError):
            self.is_lost = True
            return []

    def _lose(self, error: OSError) -> None:
        self.is_lost = True
        self.why = UNREACHABLE if error.errno in _UNREACHABLE else CLOSED

    def close(self) -> None:
        """Close it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def waiting(readable: list[Any], seconds: float) -> list[Any]:
    """Those of `readable` that have something to read, once one has or `seconds` are over."""
    if not readable:
        time.sleep(seconds)
        return []
    poll = select.poll()
    by_number = {each.fileno(): each for each in readable}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(seconds * 1000)]


def listen(*, here_alone: bool) -> socket.socket:
    """A listening socket on a free port, of this machine alone or of all its addresses."""
    if here_alone:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    except (OSError, ValueError):
        # A machine without IPv6.
        return socket.create_server(("", 0), backlog=1024)


def _mind(connection: socket.socket) -> None:
    """Let the kernel ask for the other one's kernel (Linux tcp(7)); elsewhere the system's own times hold."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, GONE_SECONDS // _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_SECONDS * 1000)
