"""Authenticated messages over TCP between a rank and the coordinator.

The kernel closes the connection at once when the process at its other end dies, and within seconds when that machine
dies. `Connection.is_lost` then becomes true, and the coordinator takes the rank for dead (`_detect_dead_ranks`).

Each side begins with a line that holds a random number. Every later line is an HMAC and a message
(`process_messages.py`). The HMAC covers the message, its number and the direction. Its key is derived from the run's
secret and both random numbers. So only messages of this run's ranks are parsed, and none can be replayed. Messages are
not encrypted.
"""

import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_finetune.cluster.launch.remote import own_addresses
from ds_finetune.cluster.watchdog.messages import FROM_COORDINATOR, FROM_RANK
from ds_finetune.system.info import interfaces
from ds_finetune.system.process_messages import MAX_LINE_BYTES, LineBuffer, MessageError, ProcessMessage, decode, encode
from ds_finetune.system.world import World

UNREACHABLE_SECONDS = 12
"""Seconds without an answer from the other machine's kernel after which a connection is lost. The kernel answers even
while the process is stopped or busy.
"""
CLOSED = "ended without a message: its process was killed by a signal, or crashed in native code"
UNREACHABLE = "cannot be reached over the network: its machine is down, or packets to it are lost"
STUCK = "has stopped reading its messages: its process is stopped or overloaded"
MALFORMED = "sent what is no message of this run: its connection was damaged, or it runs another version"
_UNREACHABLE_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_THIN_LINEAR_TIMEOUTS = 16
"""The socket option TCP_THIN_LINEAR_TIMEOUTS (Linux 2.6.34, include/uapi/linux/tcp.h): a lost packet is sent again
each 0.2 s for the first 1.5 s, before intervals double. Where half of all packets is lost, one of 4,096 then takes
longer than five seconds, instead of one of 64.
"""
_IDLE_SECONDS, _PROBE_SECONDS = 3, 1
"""The kernel probes an idle connection, and one that has not answered more often: where a third of all packets is lost,
four probes in a row are lost within minutes, ten hardly ever.
"""
_SEND_SECONDS = 2.0
_RECEIVED_SECONDS = 0.02
_CLOSE_SECONDS = 2.0
FIRST_BYTES = 4096
"""Bytes of the longest line that is read before the other side has shown that it knows the secret. Later lines may have
MAX_LINE_BYTES: a report with the last lines of a failure, or 128 collectives of a rank.
"""
_READ_BYTES = 2**16
_NONCE_BYTES = 16
_FROM_COORDINATOR, _FROM_RANK = b"ds_finetune watchdog 3, from the coordinator", b"ds_finetune watchdog 3, from a rank"
_TCP_INFO_BYTES = 220
_TCP_INFO = {
    "retransmits": ("B", 2),
    "unacked": ("I", 24),
    "total_retrans": ("I", 100),
    "data_segs_out": ("I", 156),
    "dsack_dups": ("I", 216),
}
"""Type and offset of fields of struct tcp_info (Linux 5.4, include/uapi/linux/tcp.h), named without `tcpi_`."""
_LEAST_RESENT, _LEAST_RATIO = 5, 0.05
"""A connection that loses fewer packets does not hold up a collective for as long as the watchdog's limit."""
_LEAST_UNANSWERED = 3
"""Times that one packet is sent again in vain before its address counts, however many packets arrived earlier. Even a
stopped process has a kernel that answers, and the third time comes 0.8 s later at the earliest.
"""


class Connection:
    """One connection between two ends that know `secret`.

    `is_authenticated` becomes true once the other end has shown that it knows the secret. `is_lost` becomes true once
    the other end has closed the connection or cannot be reached; `why_lost` is the reason. The coordinator sets `rank`
    when it accepts the rank at the other end.
    """

    def __init__(self, connected: socket.socket, secret: bytes, *, is_coordinator: bool) -> None:
        self._socket = connected
        self._secret = secret
        self._is_coordinator = is_coordinator
        self._nonce, self._their_nonce = secrets.token_bytes(_NONCE_BYTES), b""
        self._send_key = self._receive_key = b""
        self._num_sent = self._num_received = 0
        self._lines = LineBuffer(peer="the other end", max_bytes=FIRST_BYTES)
        self._sending = threading.Lock()
        self.is_authenticated = self.is_lost = False
        self.why_lost = CLOSED
        self.rank: int | None = None
        self.opened_at = time.monotonic()
        connected.settimeout(_SEND_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel probes the other kernel, and sends lost packets again soon; other systems use their own times.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNREACHABLE_SECONDS // _PROBE_SECONDS)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREACHABLE_SECONDS * 1000)
            connected.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
            with suppress(OSError):
                # Under BBR it has no effect: no connection leaves slow start (Linux 6.18, include/net/tcp.h,
                # tcp_stream_is_thin).
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        self._write(self._nonce.hex().encode() + b"\n")

    @classmethod
    def open(cls, address: str, port: int, secret: bytes, *, timeout: float) -> "Connection":
        """Connect to the coordinator; OSError where that takes longer than `timeout` seconds."""
        connection = cls(socket.create_connection((address, port), timeout=timeout), secret, is_coordinator=False)
        until = time.monotonic() + timeout
        while not connection._their_nonce and not connection.is_lost:
            if time.monotonic() > until:
                connection.close()
                raise TimeoutError(errno.ETIMEDOUT, f"{address}:{port} sent nothing for {timeout:.0f} s")
            if wait_readable([connection], 1.0):
                connection.receive()
        return connection

    def fileno(self) -> int:
        """For `poll`."""
        return self._socket.fileno()

    def send(self, message: ProcessMessage) -> None:
        """Send a message; a failure sets `is_lost`."""
        assert self._their_nonce, "nothing is sent before the other end's random number has arrived"
        body = encode(message)
        with self._sending:
            tag = _tag(self._send_key, self._num_sent, body[:-1])
            self._num_sent += 1
            self._write(tag + b" " + body)

    def receive(self) -> list[ProcessMessage]:
        """Read once, and return the messages that are complete; waits if nothing has arrived."""
        try:
            piece = self._socket.recv(_READ_BYTES)
        except OSError as error:
            self._lose(error)
            return []
        if not piece:
            self.is_lost = True
            return []
        return list(self._messages(piece))

    @property
    def is_unanswered(self) -> bool:
        """Whether the other kernel has not acknowledged a packet in time; false where this one does not tell."""
        if sys.platform != "linux" or self._socket.fileno() < 0:
            return False
        info = _tcp_info(self._socket)
        return info["unacked"] > 0 and info["retransmits"] > 0

    def wait_until_received(self, until: float) -> None:
        """Wait until the other end's kernel has all that was sent, or until that time of the monotonic clock."""
        while sys.platform == "linux" and not self.is_lost and time.monotonic() < until:
            if not _tcp_info(self._socket)["unacked"]:
                return
            time.sleep(_RECEIVED_SECONDS)

    def close_after_reading(self) -> None:
        """Send no more, and close once the other end has read everything, or after two seconds.

        Closing at once with unread messages would make the kernel reset the connection (RFC 2525, 2.17), which
        drops what the other end has not read yet, such as the reason for leaving.
        """
        until = time.monotonic() + _CLOSE_SECONDS
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(_READ_BYTES):
                    break
        self.close()

    def close(self) -> None:
        """Close the connection at once."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _write(self, line: bytes) -> None:
        try:
            self._socket.sendall(line)
        except OSError as error:
            self._lose(error)

    def _messages(self, piece: bytes) -> Iterator[ProcessMessage]:
        """Messages of the lines that are complete; the first line is the random number, not a message."""
        try:
            for line in self._lines.feed(piece):
                if not self._their_nonce:
                    self._agree_on_keys(line)
                else:
                    yield self._authenticated(line)
        except MessageError as error:
            # A report does not repeat what a stranger has sent.
            self.is_lost = True
            self.why_lost = f"{MALFORMED} ({error.reason})" if self.is_authenticated else MALFORMED

    def _authenticated(self, line: bytes) -> ProcessMessage:
        """The message of a line; MessageError where its HMAC is wrong or it is no message."""
        tag, _, body = line.partition(b" ")
        if not hmac.compare_digest(tag, _tag(self._receive_key, self._num_received, body)):
            raise MessageError(self._lines.peer, "its HMAC is wrong")
        self._num_received += 1
        self.is_authenticated, self._lines.max_bytes = True, MAX_LINE_BYTES
        return decode(body, FROM_RANK if self._is_coordinator else FROM_COORDINATOR, peer=self._lines.peer)

    def _agree_on_keys(self, line: bytes) -> None:
        """Derive both keys from the random number in the other end's first line."""
        try:
            nonce = bytes.fromhex(line.decode("ascii"))
        except ValueError:
            nonce = b""
        if len(nonce) != _NONCE_BYTES:
            raise MessageError(self._lines.peer, f"its first line is not a number of {_NONCE_BYTES} bytes")
        self._their_nonce = nonce
        both = self._nonce + nonce if self._is_coordinator else nonce + self._nonce
        keys = [hmac.digest(self._secret, label + both, hashlib.sha256) for label in (_FROM_COORDINATOR, _FROM_RANK)]
        self._send_key, self._receive_key = keys if self._is_coordinator else keys[::-1]

    def _lose(self, error: OSError) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        if isinstance(error, TimeoutError) and error.errno is None:
            # Python's own timeout of `settimeout`: the kernel's buffer stays full.
            self.why_lost = UNREACHABLE if self.is_unanswered else STUCK
        else:
            self.why_lost = UNREACHABLE if error.errno in _UNREACHABLE_ERRORS else CLOSED


def wait_readable(readable: list[Any], seconds: float) -> list[Any]:
    """Wait until one of `readable` has something to read, or `seconds` are over; returns those that have."""
    if not readable:
        time.sleep(seconds)
        return []
    poll = select.poll()
    by_number = {each.fileno(): each for each in readable}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(seconds * 1000)]


def coordinator_address(world: World, environ: Mapping[str, str]) -> str:
    """The address at which the other ranks reach rank zero; empty where it is unknown, to listen on all addresses.

    It is the loopback where all ranks are on this machine, else the address of the interface that
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names, else the address of MASTER_ADDR. A name that resolves to the
    loopback, as in many /etc/hosts files, is not used.
    """
    if world.local_world_size == world.world_size:
        return "127.0.0.1"
    # NCCL's variable may begin with `^` (all but these interfaces) or `=` (exactly these names).
    chosen = (environ.get(name, "").removeprefix("=") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))
    known = interfaces()
    for address in (address for names in chosen for name in names.split(",") for address in known.get(name, ())):
        if not ipaddress.ip_address(address).is_link_local:
            return address
    for address in own_addresses(world.master_addr):
        # On other machines a name that resolves to the loopback here may resolve to this machine. A literal address is
        # the same everywhere.
        if address == world.master_addr or not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
    return ""


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
    return hmac.digest(key, number.to_bytes(8, "big") + body, hashlib.sha256).hex().encode()


@dataclass(frozen=True)
class PacketCounts:
    """Data packets that this process sent to each address, and those of them that were sent again as they were lost.

    `unanswered` says how often the packet that waits for an answer now has been sent again.
    """

    sent: Mapping[str, int]
    resent: Mapping[str, int]
    unanswered: Mapping[str, int] = field(default_factory=dict)

    def losses_since(self, before: "PacketCounts") -> tuple[str, ...]:
        """One text for each address to which many packets were lost since `before`."""
        texts = []
        for address, total in self.resent.items():
            resent = total - before.resent.get(address, 0)
            sent = self.sent[address] - before.sent.get(address, 0)
            is_many = resent >= max(_LEAST_RESENT, _LEAST_RATIO * sent)
            if is_many or self.unanswered.get(address, 0) >= _LEAST_UNANSWERED:
                texts.append(f"to {address}: {resent:,} of {sent:,} packets sent again ({resent / max(sent, 1):.0%})")
        return tuple(texts)


NO_PACKETS = PacketCounts({}, {})


def packet_counts() -> PacketCounts:
    """The packets of the TCP connections that are open now (the watchdog's, gloo's, and NCCL's where it uses sockets).

    There are none where the kernel does not tell.
    """
    sent, resent, unanswered = Counter[str](), Counter[str](), Counter[str]()
    for entry in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        # A connection may be closed meanwhile, and most files are none.
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                info = _tcp_info(connection)
                address = str(connection.getpeername()[0]).removeprefix("::ffff:")
            sent[address] += info["data_segs_out"]
            # The last packet of a series is sent again after milliseconds, which the other end reports as needless
            # (RFC 8985, tail loss probes).
            resent[address] += max(info["total_retrans"] - info["dsack_dups"], 0)
            unanswered[address] = max(unanswered[address], info["retransmits"])
    return PacketCounts(sent, resent, unanswered)


def _tcp_info(connection: socket.socket) -> dict[str, int]:
    """The fields of `_TCP_INFO`; zeros where an older kernel does not have them."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES).ljust(_TCP_INFO_BYTES, b"\0")
    return {name: struct.unpack_from(kind, info, offset)[0] for name, (kind, offset) in _TCP_INFO.items()}
