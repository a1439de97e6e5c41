"""Authenticated messages over real sockets."""

import hashlib
import hmac
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from ds_finetune.watchdog import connection as wire
from ds_finetune.watchdog.connection import (
    CLOSED,
    FIRST_BYTES,
    MALFORMED,
    UNREACHABLE,
    Connection,
    Message,
    listen,
    waiting,
)

SECONDS = 15.0
SECRET = b"of this run"


def linked(theirs: bytes = SECRET) -> tuple[Connection, Connection]:
    """Both ends of a connection: the hub's, and that of a rank with the secret `theirs`."""
    with listen("127.0.0.1") as listener:
        found: list[Connection] = []
        thread = threading.Thread(target=lambda: found.append(Connection(listener.accept()[0], SECRET, is_hub=True)))
        thread.start()
        rank = Connection.to("127.0.0.1", listener.getsockname()[1], theirs, timeout=SECONDS)
        thread.join(SECONDS)
    return found[0], rank


def next_message(link: Connection) -> Message | None:
    """The next message, or None once the link is lost."""
    until = time.monotonic() + SECONDS
    while not link.is_lost:
        assert time.monotonic() < until
        if messages := link.received() if waiting([link], 1.0) else []:
            assert len(messages) == 1
            return messages[0]
    return None


def test_messages_go_both_ways() -> None:
    hub, rank = linked()
    for number in range(3):
        rank.send({"kind": "still", "number": number})
        assert next_message(hub) == {"kind": "still", "number": number}
        hub.send({"kind": "ask", "number": number})
        assert next_message(rank) == {"kind": "ask", "number": number}
    assert hub.is_known
    rank.send({"kind": "bye"})
    rank.close()
    assert next_message(hub) == {"kind": "bye"}
    assert next_message(hub) is None
    assert hub.why == CLOSED


def test_another_secret_is_heard_by_neither_end() -> None:
    hub, rank = linked(theirs=b"a guess")
    rank.send({"kind": "failed"})
    assert next_message(hub) is None
    assert (hub.is_known, hub.why) == (False, MALFORMED)


def _frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


@pytest.mark.parametrize(
    "sent",
    [
        b'{"kind": "failed"}\n',
        _frame(b"x" * 16) + _frame(b'{"kind": "failed"}'),
        _frame(b"x" * 16) + _frame(b"\0" * 32 + b'{"kind": "failed"}'),
        _frame(b"too short"),
        struct.pack(">I", FIRST_BYTES + 1),
        struct.pack(">I", 2**32 - 1),
        _frame(b"x" * 16) + _frame(b""),
    ],
    ids=["line", "no tag", "wrong tag", "nonce", "long", "longest", "empty"],
)
def test_what_is_no_frame_of_this_run_ends_the_connection_and_holds_no_memory(sent: bytes) -> None:
    with listen("127.0.0.1") as listener, socket.create_connection(listener.getsockname()) as stranger:
        hub = Connection(listener.accept()[0], SECRET, is_hub=True)
        stranger.sendall(sent)
        assert next_message(hub) is None
        assert hub.why == MALFORMED
        hub.close()


def test_a_frame_cannot_be_repeated_reflected_or_used_on_another_connection() -> None:
    """By one that sits between both ends, and sees what they send."""
    seen: list[bytes] = []
    with listen("127.0.0.1") as listener, listen("127.0.0.1") as between:
        thread = threading.Thread(target=lambda: seen.append(_relay(between, listener.getsockname())))
        thread.start()
        rank = threading.Thread(target=_say_once, args=(between.getsockname()[1],))
        rank.start()
        hub = Connection(listener.accept()[0], SECRET, is_hub=True)
        assert next_message(hub) == {"kind": "bye"}
        rank.join(SECONDS)
        thread.join(SECONDS)
        nonce, frame = seen[0][:20], seen[0][20:]
        for repeated in (frame, nonce + frame):
            with socket.create_connection(listener.getsockname()) as again:
                other = Connection(listener.accept()[0], SECRET, is_hub=True)
                again.sendall(repeated)
                assert next_message(other) is None
                assert not other.is_known


def _say_once(port: int) -> None:
    link = Connection.to("127.0.0.1", port, SECRET, timeout=SECONDS)
    link.send({"kind": "bye"})
    link.part()


def _relay(listener: socket.socket, to: tuple[str, int]) -> bytes:
    """Pass on what one rank and the hub say; returns what the rank said."""
    said = b""
    with listener.accept()[0] as rank, socket.create_connection(to) as hub:
        rank.sendall(hub.recv(20, socket.MSG_WAITALL))
        while piece := rank.recv(1024):
            said += piece
            hub.sendall(piece)
            if len(said) > 20:
                break
    return said


def test_a_repeated_message_is_refused() -> None:
    hub, rank = linked()
    tag = hmac.digest(rank._keys[0], (0).to_bytes(8, "big") + b'{"kind": "bye"}', hashlib.sha256)
    rank._write(tag + b'{"kind": "bye"}')
    assert next_message(hub) == {"kind": "bye"}
    rank._write(tag + b'{"kind": "bye"}')
    assert next_message(hub) is None
    assert hub.why == MALFORMED


@pytest.mark.parametrize("body", [b"nonsense", b"[]", b"{}", b'{"kind": 3}', b"[" * 50_000])
def test_a_body_that_is_no_message_loses_the_connection_and_raises_nothing(body: bytes) -> None:
    hub, rank = linked()
    rank.send({"kind": "hello"})
    assert next_message(hub) == {"kind": "hello"}
    rank._write(hmac.digest(rank._keys[0], (1).to_bytes(8, "big") + body, hashlib.sha256) + body)
    assert next_message(hub) is None
    assert hub.why == MALFORMED


def test_a_message_may_come_in_pieces() -> None:
    hub, rank = linked()
    rank.send({"kind": "hello"})
    assert next_message(hub) == {"kind": "hello"}
    rank.send({"kind": "failed", "text": "x" * 500_000})
    assert len(json.dumps(next_message(hub))) > 500_000


def test_a_reason_is_read_although_the_one_that_leaves_has_unread_messages() -> None:
    """Closing a socket with unread bytes resets the connection, which drops what is on its way."""
    hub, rank = linked()
    rank.send({"kind": "hello"})
    assert next_message(hub) == {"kind": "hello"}
    hub.send({"kind": "ask"})
    assert waiting([rank], SECONDS)
    rank.send({"kind": "leaving", "why": "x" * 100_000})
    thread = threading.Thread(target=rank.part)
    thread.start()
    message = next_message(hub)
    assert message is not None
    assert message["kind"] == "leaving"
    assert next_message(hub) is None
    hub.close()
    thread.join(SECONDS)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="a network of its own needs root and ip")
def test_a_network_that_drops_packets_is_told_from_a_dead_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a network namespace of one thread, whose loopback is shut down while a connection is open."""
    monkeypatch.setattr(wire, "GONE_SECONDS", 3)
    found: list[tuple[Connection, wire.PacketLoss, wire.PacketLoss]] = []

    def work() -> None:
        import ctypes

        clone_new_network = 0x40000000
        if ctypes.CDLL(None).unshare(clone_new_network):
            return
        # A thread has a network of its own, which its children share.
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        hub, _rank = linked_here()
        before = hub.loss()
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        hub.send({"kind": "ask"})
        _until(lambda: hub.loss().unacknowledged > 0 or hub.is_lost)
        found.append((hub, before, hub.loss()))
        _until(lambda: hub.is_lost or (waiting([hub], 1.0) and hub.received() and False))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    if not found:
        pytest.skip("no network namespace can be made here")
    hub, before, after = found[0]
    assert before == wire.PacketLoss()
    assert after.unacknowledged > 0
    assert (hub.is_lost, hub.why) == (True, UNREACHABLE)


def linked_here() -> tuple[Connection, Connection]:
    """Both ends, made by this thread alone."""
    with listen("127.0.0.1") as listener, socket.socket() as connecting:
        connecting.setblocking(False)
        connecting.connect_ex(listener.getsockname())
        hub = Connection(listener.accept()[0], SECRET, is_hub=True)
        connecting.setblocking(True)
        rank = Connection(connecting.dup(), SECRET, is_hub=False)
    for link in (hub, rank):
        assert waiting([link], SECONDS)
        assert link.received() == []
    return hub, rank


def _until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 3 * SECONDS
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.01)
