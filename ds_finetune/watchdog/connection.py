"""Authenticated messages over TCP. The kernel reports a process that died at once, and a machine that is gone within
seconds.

Each side begins with a frame that is a random number. Every later frame is a JSON message with an HMAC over the
message, its number and the direction, under a key made of the run's secret and both random numbers: nothing is
parsed that did not come from a rank of this run, and nothing can be replayed. Messages are not encrypted.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

Message = dict[str, Any]
T = TypeVar("T")

GONE_SECONDS = 12
"""Without an answer from the other machine's kernel for so long a connection is lost; one whose process is stopped or
busy is not.
"""
CLOSED = "ended without a message: its process was killed by a signal, or crashed in native code"
UNREACHABLE = "cannot be reached over the network: its machine is gone, or packets to it are lost"
STUCK = "has stopped reading its messages: its process is stopped or overloaded"
MALFORMED = "sent what is no message of this run: its connection was damaged, or it runs another version"
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_PROBE_SECONDS = 3
_SEND_SECONDS = 2.0
_PARTING_SECONDS = 2.0
LONGEST_FRAME = 2**22
"""Bytes of a frame: a report with the last lines of a failure, or 128 collectives of a rank."""
FIRST_BYTES = 4096
"""Bytes of a frame before the other side has shown that it knows the secret."""
_CHUNK = 2**16
_NONCE_BYTES, _TAG_BYTES, _HEADER = 16, 32, struct.Struct(">I")
_FROM_HUB, _FROM_RANK = b"ds_finetune watchdog 2, from the hub", b"ds_finetune watchdog 2, from a rank"
_TCP_INFO_BYTES = 228
_RETRANSMITS_AT, _UNACKED_AT, _RESENT_AT, _NEEDLESS_AT, _DISORDERED_AT = 2, 24, 100, 216, 224
"""Offsets in struct tcp_info (Linux 5.4, include/uapi/linux/tcp.h): tcpi_retransmits (a byte), tcpi_unacked,
tcpi_total_retrans, tcpi_dsack_dups, tcpi_rcv_ooopack.
"""


@dataclass(frozen=True)
class PacketLoss:
    """What the kernel knows of a connection: segments not acknowledged in time, and how many were lost so far."""

    unacknowledged: int = 0
    lost: int = 0


class Connection:
    """One connection between two ends that know `secret`.

    `is_lost` once the other end is gone, with the reason in `why`; `is_known` once it has shown that it knows the
    secret;
    `peer` is its rank, as the hub numbers it.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, is_hub: bool) -> None:
        self._socket = connection
        self._secret = secret
        self._is_hub = is_hub
        self._nonce, self._their_nonce = secrets.token_bytes(_NONCE_BYTES), b""
        self._keys = (b"", b"")
        self._num_sent = self._num_received = 0
        self._buffer = b""
        self._sending = threading.Lock()
        self.is_known = self.is_lost = False
        self.why = CLOSED
        self.peer: int | None = None
        self.opened_at = time.monotonic()
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connection)
        self._write(self._nonce)

    @classmethod
    def to(cls, address: str, port: int, secret: bytes, *, timeout: float) -> "Connection":
        """Connect; OSError where that cannot be done in `timeout` seconds."""
        link = cls(socket.create_connection((address, port), timeout=timeout), secret, is_hub=False)
        until = time.monotonic() + timeout
        while not link._their_nonce and not link.is_lost:
            if time.monotonic() > until:
                link.close()
                raise TimeoutError(errno.ETIMEDOUT, f"{address}:{port} sent nothing for {timeout:.0f} s")
            if waiting([link], 1.0):
                link.received()
        return link

    def fileno(self) -> int:
        """For `poll`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send, where the other end is still there."""
        assert self._their_nonce, "nothing is sent before the other end has begun"
        body = json.dumps(message).encode()
        with self._sending:
            tag = _tag(self._keys[0], self._num_sent, body)
            self._num_sent += 1
            self._write(tag + body)

    def received(self) -> list[Message]:
        """Whole messages that have come; waits where nothing has."""
        try:
            chunk = self._socket.recv(_CHUNK)
        except OSError as error:
            self._lose(error)
            return []
        if not chunk:
            self.is_lost = True
            return []
        self._buffer += chunk
        return list(self._messages())

    def loss(self) -> PacketLoss:
        """What the kernel knows of lost packets; nothing where it does not say."""
        if sys.platform != "linux" or self._socket.fileno() < 0:
            return PacketLoss()
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES).ljust(
            _TCP_INFO_BYTES, b"\0"
        )
        places = (_UNACKED_AT, _RESENT_AT, _NEEDLESS_AT, _DISORDERED_AT)
        unacknowledged, resent, needless, disordered = (struct.unpack_from("I", info, place)[0] for place in places)
        # Every segment is unacknowledged for a while; the last one of a series is sent again after milliseconds, which
        # the other
        # end reports as needless (RFC 8985, tail loss probes).
        return PacketLoss(unacknowledged if info[_RETRANSMITS_AT] else 0, max(resent - needless, 0) + disordered)

    def part(self) -> None:
        """Say no more, and wait a moment until the other end has read everything and closes.

        Closing at once with unread messages would make the kernel reset the connection (RFC 2525, 2.17), which
        drops what the other end has not read yet, such as the reason for leaving.
        """
        until = time.monotonic() + _PARTING_SECONDS
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(_CHUNK):
                    break
        self.close()

    def close(self) -> None:
        """Close it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _write(self, payload: bytes) -> None:
        try:
            self._socket.sendall(_HEADER.pack(len(payload)) + payload)
        except OSError as error:
            self._lose(error)

    def _messages(self) -> Iterator[Message]:
        """Messages of the whole frames in the buffer."""
        while len(self._buffer) >= _HEADER.size and not self.is_lost:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > (LONGEST_FRAME if self.is_known else FIRST_BYTES):
                self._refuse()
                return
            if len(self._buffer) < _HEADER.size + length:
                return
            payload = self._buffer[_HEADER.size : _HEADER.size + length]
            self._buffer = self._buffer[_HEADER.size + length :]
            yield from self._opened(payload)

    def _opened(self, payload: bytes) -> Iterator[Message]:
        """The message of a frame; none of the first one, and none of a forged one."""
        if not self._their_nonce:
            self._begin(payload)
            return
        tag, body = payload[:_TAG_BYTES], payload[_TAG_BYTES:]
        if not hmac.compare_digest(tag, _tag(self._keys[1], self._num_received, body)):
            self._refuse()
            return
        self._num_received += 1
        self.is_known = True
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict) and isinstance(message.get("kind"), str):
            yield message
        else:
            self._refuse()

    def _begin(self, nonce: bytes) -> None:
        if len(nonce) != _NONCE_BYTES:
            self._refuse()
            return
        self._their_nonce = nonce
        both = self._nonce + nonce if self._is_hub else nonce + self._nonce
        hub, rank = (hmac.digest(self._secret, label + both, hashlib.sha256) for label in (_FROM_HUB, _FROM_RANK))
        self._keys = (hub, rank) if self._is_hub else (rank, hub)

    def _refuse(self) -> None:
        self.is_lost, self.why = True, MALFORMED

    def _lose(self, error: OSError) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        if isinstance(error, TimeoutError) and error.errno is None:
            # Python's own timeout of `settimeout`: the kernel's buffer stays full.
            self.why = UNREACHABLE if self.loss().unacknowledged else STUCK
        else:
            self.why = UNREACHABLE if error.errno in _UNREACHABLE else CLOSED


def parsed(kind: type[T], tree: object) -> T:
    """`tree` of a message as a `kind`, every field of the type it is declared with; ValueError otherwise."""
    return TypeAdapter(kind).validate_python(tree)


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


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of `address`, or of all addresses where it is empty."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=1024)
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    except (OSError, ValueError):
        # A machine without IPv6.
        return socket.create_server(("", 0), backlog=1024)


def _tag(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, hashlib.sha256)


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel ask for the other one's kernel (Linux tcp(7)); elsewhere the system's own times hold."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, GONE_SECONDS // _PROBE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_SECONDS * 1000)
