"""Lost packets between real sockets: the receiver's own filter drops a share of what arrives, as a bad link does."""

import re
import socket
import sys
import time

import pytest

from ds_finetune.cluster.watchdog.connection import Connection, PacketCounts, _tcp_info, packet_counts
from tests.cluster.watchdog.faulty import lose_packets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counters and filters of Linux")


def _echo(share: float, times: int) -> tuple[str, ...]:
    """What this process counts while a message goes to and fro."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
        with near, far:
            before = packet_counts()
            if share:
                lose_packets(near, share)
                lose_packets(far, share)
            for _ in range(times):
                for one, other in ((near, far), (far, near)):
                    one.sendall(b"x")
                    assert other.recv(1) == b"x"
            return packet_counts().losses_since(before)


def test_lost_packets_are_counted_by_address() -> None:
    (loss,) = _echo(0.3, 30)
    assert loss.startswith("to 127.0.0.1: ")
    assert "packets sent again" in loss


def test_a_network_without_losses_has_none() -> None:
    assert _echo(0, 100) == ()


def test_one_packet_that_nothing_answers_is_a_bad_link_however_many_arrived_before() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
        with near, far:
            for _ in range(300):
                near.sendall(b"x")
                assert far.recv(1) == b"x"
            before = packet_counts()
            assert packet_counts().losses_since(before) == ()
            lose_packets(far, 0.999999)
            near.sendall(b"x")
            until = time.monotonic() + 60
            while not (losses := packet_counts().losses_since(before)) and time.monotonic() < until:
                time.sleep(0.05)
    (loss,) = losses
    assert re.fullmatch(r"to 127\.0\.0\.1: [3-5] of [1-6] packets sent again .*", loss), loss


def test_the_watchdog_sends_lost_packets_again_soon_and_often() -> None:
    """By itself the kernel sends a packet six times before the connection is lost after twelve seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = Connection(socket.create_connection(listening.getsockname()), b"", is_coordinator=False)
        far, _ = listening.accept()
        with far:
            assert far.recv(100)
            lose_packets(far, 0.999999)
            near._write(b"x")
            until = time.monotonic() + 20
            while _tcp_info(near._socket)["total_retrans"] < 8:
                assert time.monotonic() < until
                time.sleep(0.05)
        near.close()


def test_a_few_lost_packets_are_no_bad_link() -> None:
    before, after = PacketCounts({"a": 100}, {"a": 40}), PacketCounts({"a": 10_100}, {"a": 140})
    assert after.losses_since(before) == ()
    assert PacketCounts({"a": 200}, {"a": 70}).losses_since(before) == ("to a: 30 of 100 packets sent again (30%)",)
