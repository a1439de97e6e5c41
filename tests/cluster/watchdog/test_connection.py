"""Authenticated messages over real sockets."""

import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from ds_finetune.cluster.watchdog import connection as module
from ds_finetune.cluster.watchdog.connection import (
    CLOSED,
    FIRST_BYTES,
    MALFORMED,
    UNREACHABLE,
    Connection,
    listen,
    wait_readable,
)
from ds_finetune.cluster.watchdog.messages import HangReport, RankGoodbye, RankLeaving, RankRefused, StatusRequest
from ds_finetune.system.process_messages import ProcessMessage

SECONDS = 15.0
SECRET = b"of this run"
GOODBYE = b'{"kind": "goodbye"}'


def connected(theirs: bytes = SECRET) -> tuple[Connection, Connection]:
    """Both ends of a connection: the coordinator's, and that of a rank with the secret `theirs`."""
    with listen("127.0.0.1") as listener:
        found: list[Connection] = []
        thread = threading.Thread(
            target=lambda: found.append(Connection(listener.accept()[0], SECRET, is_coordinator=True))
        )
        thread.start()
        rank = Connection.open("127.0.0.1", listener.getsockname()[1], theirs, timeout=SECONDS)
        thread.join(SECONDS)
    return found[0], rank


def next_message(connection: Connection) -> ProcessMessage | None:
    """The next message, or None once the connection is lost."""
    until = time.monotonic() + SECONDS
    while not connection.is_lost:
        assert time.monotonic() < until
        if messages := connection.receive() if wait_readable([connection], 1.0) else []:
            assert len(messages) == 1
            return messages[0]
    return None


def test_messages_go_both_ways() -> None:
    coordinator, rank = connected()
    for number in range(3):
        rank.send(HangReport(f"{number}"))
        assert next_message(coordinator) == HangReport(f"{number}")
        coordinator.send(RankRefused(f"{number}"))
        assert next_message(rank) == RankRefused(f"{number}")
    assert coordinator.is_authenticated
    rank.send(RankGoodbye())
    rank.close()
    assert next_message(coordinator) == RankGoodbye()
    assert next_message(coordinator) is None
    assert coordinator.why_lost == CLOSED


def test_an_end_with_another_secret_is_refused() -> None:
    coordinator, rank = connected(theirs=b"a guess")
    rank.send(HangReport(""))
    assert next_message(coordinator) is None
    assert (coordinator.is_authenticated, coordinator.why_lost) == (False, MALFORMED)


NONCE = b"0" * 32 + b"\n"


@pytest.mark.parametrize(
    "sent",
    [
        GOODBYE + b"\n",
        NONCE + GOODBYE + b"\n",
        NONCE + b"0" * 64 + b" " + GOODBYE + b"\n",
        b"00\n",
        b"x" * 32 + b"\n",
        b"x" * (FIRST_BYTES + 1),
        NONCE + b"x" * (FIRST_BYTES + 1),
        NONCE + b"\n",
    ],
    ids=["no number", "no tag", "wrong tag", "short number", "no digits", "long", "long second", "empty"],
)
def test_what_is_no_line_of_this_run_ends_the_connection_and_holds_no_memory(sent: bytes) -> None:
    with listen("127.0.0.1") as listener, socket.create_connection(listener.getsockname()) as stranger:
        coordinator = Connection(listener.accept()[0], SECRET, is_coordinator=True)
        stranger.sendall(sent)
        assert next_message(coordinator) is None
        assert coordinator.why_lost == MALFORMED
        coordinator.close()


def test_a_line_cannot_be_repeated_reflected_or_used_on_another_connection() -> None:
    """By one that sits between both ends, and sees what they send."""
    seen: list[bytes] = []
    with listen("127.0.0.1") as listener, listen("127.0.0.1") as between:
        thread = threading.Thread(target=lambda: seen.append(_relay(between, listener.getsockname())))
        thread.start()
        rank = threading.Thread(target=_send_goodbye, args=(between.getsockname()[1],))
        rank.start()
        coordinator = Connection(listener.accept()[0], SECRET, is_coordinator=True)
        assert next_message(coordinator) == RankGoodbye()
        rank.join(SECONDS)
        thread.join(SECONDS)
        nonce, line = seen[0][: len(NONCE)], seen[0][len(NONCE) :]
        for repeated in (line, nonce + line):
            with socket.create_connection(listener.getsockname()) as again:
                other = Connection(listener.accept()[0], SECRET, is_coordinator=True)
                again.sendall(repeated)
                assert next_message(other) is None
                assert not other.is_authenticated


def _send_goodbye(port: int) -> None:
    connection = Connection.open("127.0.0.1", port, SECRET, timeout=SECONDS)
    connection.send(RankGoodbye())
    connection.close_after_reading()


def _relay(listener: socket.socket, to: tuple[str, int]) -> bytes:
    """Pass on what one rank and the coordinator send; returns what the rank sent."""
    sent = b""
    with listener.accept()[0] as rank, socket.create_connection(to) as coordinator:
        rank.sendall(coordinator.recv(len(NONCE), socket.MSG_WAITALL))
        while piece := rank.recv(1024):
            sent += piece
            coordinator.sendall(piece)
            if len(sent) > len(NONCE):
                break
    return sent


def _write_signed(connection: Connection, number: int, body: bytes) -> None:
    tag = hmac.digest(connection._send_key, number.to_bytes(8, "big") + body, hashlib.sha256)
    connection._write(tag.hex().encode() + b" " + body + b"\n")


def test_a_repeated_message_is_refused() -> None:
    coordinator, rank = connected()
    _write_signed(rank, 0, GOODBYE)
    assert next_message(coordinator) == RankGoodbye()
    _write_signed(rank, 0, GOODBYE)
    assert next_message(coordinator) is None
    assert coordinator.why_lost.startswith(MALFORMED)


@pytest.mark.parametrize(
    "body", [b"nonsense", b"[]", b"{}", b'{"kind": 3}', b'{"kind": "hang"}', b'{"kind": "accepted"}', b"[" * 50_000]
)
def test_a_body_that_is_no_message_loses_the_connection_and_raises_nothing(body: bytes) -> None:
    coordinator, rank = connected()
    rank.send(HangReport(""))
    assert next_message(coordinator) == HangReport("")
    _write_signed(rank, 1, body)
    assert next_message(coordinator) is None
    assert coordinator.why_lost.startswith(MALFORMED)


def test_a_message_may_come_in_pieces() -> None:
    coordinator, rank = connected()
    rank.send(HangReport(""))
    assert next_message(coordinator) == HangReport("")
    rank.send(HangReport("x" * 500_000))
    assert next_message(coordinator) == HangReport("x" * 500_000)


def test_a_reason_is_read_although_the_one_that_leaves_has_unread_messages() -> None:
    """Closing a socket with unread bytes resets the connection, which drops what is on its way."""
    coordinator, rank = connected()
    rank.send(HangReport(""))
    assert next_message(coordinator) == HangReport("")
    coordinator.send(StatusRequest())
    assert wait_readable([rank], SECONDS)
    rank.send(RankLeaving("x" * 100_000))
    thread = threading.Thread(target=rank.close_after_reading)
    thread.start()
    assert next_message(coordinator) == RankLeaving("x" * 100_000)
    assert next_message(coordinator) is None
    coordinator.close()
    thread.join(SECONDS)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="a network of its own needs root and ip")
def test_a_network_that_drops_packets_is_told_from_a_dead_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a network namespace of one thread, whose loopback is shut down while a connection is open."""
    monkeypatch.setattr(module, "UNREACHABLE_SECONDS", 3)
    found: list[tuple[Connection, bool, bool]] = []

    def work() -> None:
        import ctypes

        clone_new_network = 0x40000000
        if ctypes.CDLL(None).unshare(clone_new_network):
            return
        # A thread has a network of its own, which its children share.
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        coordinator, _rank = connected_here()
        before = coordinator.is_unanswered
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        coordinator.send(StatusRequest())
        _until(lambda: coordinator.is_unanswered or coordinator.is_lost)
        found.append((coordinator, before, coordinator.is_unanswered))
        _until(lambda: coordinator.is_lost or (wait_readable([coordinator], 1.0) and coordinator.receive() and False))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    if not found:
        pytest.skip("no network namespace can be made here")
    coordinator, before, after = found[0]
    assert (before, after) == (False, True)
    assert (coordinator.is_lost, coordinator.why_lost) == (True, UNREACHABLE)


def connected_here() -> tuple[Connection, Connection]:
    """Both ends, made by this thread alone."""
    with listen("127.0.0.1") as listener, socket.socket() as connecting:
        connecting.setblocking(False)
        connecting.connect_ex(listener.getsockname())
        coordinator = Connection(listener.accept()[0], SECRET, is_coordinator=True)
        connecting.setblocking(True)
        rank = Connection(connecting.dup(), SECRET, is_coordinator=False)
    for connection in (coordinator, rank):
        assert wait_readable([connection], SECONDS)
        assert connection.receive() == []
    return coordinator, rank


def _until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 3 * SECONDS
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.01)
