"""Lines to the hub over real sockets: what one rank's end means to the others."""

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from ds_finetune.watchdog import coordinator as hub
from ds_finetune.watchdog.connection import (
    MALFORMED,
    UNREACHABLE,
    Connection,
    Message,
    PacketLoss,
    listen,
    parsed,
    waiting,
)
from ds_finetune.watchdog.coordinator import ECHO_SECONDS, REPORT, Coordinator
from ds_finetune.watchdog.diagnosis import LOSSY
from ds_finetune.watchdog.process_death import FOLDER, mark_kill, stacks_path
from ds_finetune.watchdog.progress import HangLimits, RankProgress
from ds_finetune.watchdog.report import FailureReport, RankProcess, RunEnding

SECONDS = 30.0
SECRET = b"of this run"


class Ranks:
    """A hub and as many lines to it as ranks."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        listener = listen("127.0.0.1")
        self.port = listener.getsockname()[1]
        self.folder = folder
        self.hub = Coordinator(listener, SECRET, size, folder)
        self.hub.start()
        self.links = [self.join(rank) for rank in range(size)]
        until(lambda: len(self.hub._members) == size)

    def join(self, rank: int, secret: bytes = SECRET, host: str = "") -> Connection:
        link = Connection.to("127.0.0.1", self.port, secret, timeout=SECONDS)
        link.send(
            {"kind": "hello", "member": asdict(RankProcess(rank, host or f"host-{rank}", 4000 + rank, "1", "here"))}
        )
        return link

    def end_of(self, rank: int) -> RunEnding:
        return parsed(RunEnding, _next(self.links[rank], "end")["ending"])

    def report(self) -> str:
        """Written after the ranks are told, rank zero last."""
        until(lambda: (self.folder / FOLDER / REPORT).exists())
        return (self.folder / FOLDER / REPORT).read_text()


def until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.01)


def _next(link: Connection, kind: str) -> Message:
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        for message in link.received() if waiting([link], 1.0) else []:
            if message["kind"] == kind:
                return message
    raise AssertionError(f"no `{kind}` within {SECONDS} s")


def _failed(line: str, *, is_secondary: bool, code: int = 1) -> Message:
    return {"kind": "failed", "failure": asdict(FailureReport(line, f"where\n{line}", code, is_secondary))}


def test_goodbyes_end_the_hub_without_a_report(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for link in ranks.links:
        link.send({"kind": "bye"})
    ranks.hub.join(SECONDS)
    assert not ranks.hub.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_breaks_ends_the_others_at_once(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    began = time.monotonic()
    ranks.links[1].close()
    for rank in (0, 2):
        ending = ranks.end_of(rank)
        assert (ending.first, ending.code, ending.speaker) == ((1,), 1, 0)
        assert "rank 1 (host host-1, process 4001) ended without a message" in ending.line
    assert time.monotonic() - began < 2
    assert "rank 1" in ranks.report()


def test_the_first_failure_is_the_cause_and_its_code_everyones(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.links[2].send(_failed("ModelError: no weights", is_secondary=False, code=7))
    ending = ranks.end_of(1)
    ranks.links[0].send(_failed("KeyError: later", is_secondary=False))
    assert (ending.first, ending.code) == ((2,), 7)
    assert "ModelError: no weights" in ranks.report()
    assert "later" not in ranks.report()


def test_a_users_mistake_leaves_no_report(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.links[2].send(_failed("DataError: a row", is_secondary=False, code=2))
    assert ranks.end_of(0).code == 2
    assert list(tmp_path.iterdir()) == []


def test_an_echo_waits_for_its_cause(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.links[0].send(_failed("RuntimeError: gloo: Connection closed by peer", is_secondary=True))
    time.sleep(ECHO_SECONDS / 2)
    ranks.links[1].send(_failed("OSError: No space left on device", is_secondary=False))
    assert ranks.end_of(0).first == (1,)


def test_an_echo_without_a_cause_asks_everyone(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, size=2)
    ranks.links[0].send(_failed("RuntimeError: gloo: 24 vs 16", is_secondary=True))
    for rank in (0, 1):
        _next(ranks.links[rank], "ask")
        progress = RankProgress(rank, HangLimits(1, 1, 1))
        progress.enter("all_reduce", 3 if rank else 2, "all")
        ranks.links[rank].send({"kind": "answer", "answer": progress.status().as_json()})
    report = ranks.end_of(1).report
    assert "rank 0 all_reduce of 2; rank 1 all_reduce of 3" in report
    assert "24 vs 16" in report


def test_who_does_not_answer_is_ended_by_one_beside_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.links[0].send({"kind": "still", "why": "  rank 0 has made no progress"})
    for rank in (0, 2):
        _next(ranks.links[rank], "ask")
        ranks.links[rank].send({"kind": "answer", "answer": RankProgress(rank, HangLimits(1, 1, 1)).status().as_json()})
    ending = ranks.end_of(0)
    assert ending.first == (1,)
    assert ending.ended_by == {"0": [(4001, "1")]}
    assert "rank 1 (host host-1, process 4001): no answer" in ending.report


def test_a_stranger_is_not_heard(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    stranger = ranks.join(1, secret=b"guess")
    stranger.send(_failed("KeyError: not mine", is_secondary=False))
    until(lambda: stranger.received() == [] and stranger.is_lost)
    ranks.links[1].send(_failed("OSError: mine", is_secondary=False))
    assert "mine" in ranks.end_of(0).line
    assert "not mine" not in ranks.report()


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "failed"},
        {"kind": "failed", "failure": {"line": 1}},
        {"kind": "still", "why": None},
        {"kind": "answer"},
    ],
)
def test_a_message_that_cannot_be_read_does_not_end_the_hub(message: Message, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.links[0].send({"kind": "still", "why": "no progress"})
    _next(ranks.links[1], "ask")
    if message["kind"] == "still":
        # A second one is not looked at while the first is being answered.
        message = {"kind": "leaving", "why": None}
    ranks.links[1].send(message)
    ending = ranks.end_of(0)
    assert ending.first == (1,)
    assert f"rank 1 (host host-1, process 4001) {MALFORMED}" in ending.line


def test_bytes_of_a_stranger_do_not_end_the_hub(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for sent in (b'{"token": "x", "member": []}\n', b"\xff" * 10_000, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", ranks.port)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(sent)
            while stranger.recv(1024):
                pass
    ranks.links[2].send(_failed("OSError: mine", is_secondary=False))
    assert ranks.end_of(0).first == (2,)


def test_idle_connections_are_dismissed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_SPARE_STRANGERS", 5)
    ranks = Ranks(tmp_path)
    idle = [socket.create_connection(("127.0.0.1", ranks.port), timeout=SECONDS) for _ in range(40)]
    until(lambda: len(ranks.hub._strangers) == 8)
    # The oldest are gone, and a rank is heard all the same.
    assert idle[0].recv(1024, socket.MSG_WAITALL) is not None
    ranks.links[1].send(_failed("OSError: mine", is_secondary=False))
    assert ranks.end_of(0).first == (1,)
    for each in idle:
        each.close()


def test_a_connection_that_stays_silent_is_dismissed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "STRANGER_SECONDS", 0.3)
    ranks = Ranks(tmp_path)
    with socket.create_connection(("127.0.0.1", ranks.port), timeout=SECONDS) as idle:
        while idle.recv(1024):
            pass
    until(lambda: ranks.hub._strangers == [])


def test_a_rank_is_taken_once(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for member, why in ((1, "rank 1 (host host-1, process 4001) is already here"), (3, "cannot be one of 3 ranks")):
        assert why in _next(ranks.join(member), "refused")["why"]
    ranks.links[1].send(_failed("OSError: mine", is_secondary=False))
    assert ranks.end_of(0).first == (1,)


def test_a_rank_that_leaves_states_its_reason(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.links[1].send({"kind": "leaving", "why": "called os._exit(3) at x.py:7"})
    ranks.links[1].part()
    assert ranks.end_of(0).line == "rank 1 (host host-1, process 4001) called os._exit(3) at x.py:7"


def test_memory_is_named_where_the_kernel_has_counted_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [4]
    monkeypatch.setattr(hub, "oom_kills", lambda: counted[0])
    ranks = Ranks(tmp_path)
    ranks.links[1].close()
    assert "memory" not in ranks.end_of(0).line
    ranks = Ranks(tmp_path)
    counted[0] = 5
    ranks.links[1].close()
    assert "the kernel has ended 1 processes of its machine for want of memory" in ranks.end_of(0).line


def test_a_kill_by_the_program_is_marked_as_such(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    mark_kill(tmp_path / FOLDER, 4001, "1", "rank 1: does not answer")
    ranks.links[1].close()
    assert (
        "rank 1 (host host-1, process 4001) was ended by the watchdog: rank 1: does not answer" in ranks.end_of(0).line
    )


def test_a_rank_that_its_own_timer_ended_held_the_lock(tmp_path: Path) -> None:
    stacks = stacks_path(tmp_path / FOLDER, 1)
    stacks.parent.mkdir()
    stacks.write_text("Timeout (0:00:20)!\nof the run before\n")
    ranks = Ranks(tmp_path)
    ranks.links[2].close()
    assert "Python's lock" not in ranks.end_of(0).line
    ranks = Ranks(tmp_path)
    with stacks.open("a") as file:
        file.write("Timeout (0:00:20)!\n")
    ranks.links[1].close()
    assert "native code held Python's lock beyond the limit" in ranks.end_of(0).line


def _cut(ranks: Ranks, rank: int) -> None:
    """What the kernel's probes do to a connection over which nothing comes any more."""
    ranks.hub._links[rank].why = UNREACHABLE
    ranks.links[rank].close()


def test_a_rank_behind_a_lossy_network_is_not_called_dead(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    _cut(ranks, 1)
    ending = ranks.end_of(0)
    assert ending.first == (1,)
    assert UNREACHABLE in ending.line
    assert "as seen from rank 0 (host host-0)" in ending.line
    assert ending.ended_by == {}


def test_where_all_others_are_cut_off_it_is_rank_zero(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for rank in (1, 2):
        _cut(ranks, rank)
    ending = ranks.end_of(0)
    assert ending.first == (0,)
    assert "rank 0 (host host-0) reaches none of the other 2 hosts" in ending.line


def test_a_rank_that_met_a_broken_connection_is_not_at_fault(tmp_path: Path) -> None:
    """All are in one collective; rank 1 has met an error of the network in it, and is in none when it is asked."""
    ranks = Ranks(tmp_path)
    ranks.links[1].send(_failed("RuntimeError: gloo: Connection timed out", is_secondary=True))
    for rank in range(3):
        _next(ranks.links[rank], "ask")
        progress = RankProgress(rank, HangLimits(1, 1, 1))
        began = progress.enter("all_reduce", 2, "all")
        if rank == 1:
            progress.leave(began)
        ranks.links[rank].send({"kind": "answer", "answer": progress.status().as_json()})
    ending = ranks.end_of(0)
    assert ending.first == ()
    assert "no single rank" in ending.line
    assert "the network is at fault: RuntimeError: gloo: Connection timed out" in ending.line


def test_a_rank_that_ends_after_it_met_a_broken_connection_is_not_the_first(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.links[1].send(_failed("RuntimeError: gloo: Connection closed by peer", is_secondary=True))
    ranks.links[1].part()
    ranks.links[2].send(_failed("OSError: No space left on device", is_secondary=False))
    assert ranks.end_of(0).first == (2,)


def test_lossy_connections_get_more_time_and_are_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(hub, "LOSSY_SECONDS", 0.3)
    ranks = Ranks(tmp_path)
    monkeypatch.setattr(ranks.hub._links[1], "loss", lambda: PacketLoss(unacknowledged=1, lost=3))
    ranks.links[0].send({"kind": "still", "why": "no progress"})
    for rank in (0, 2):
        _next(ranks.links[rank], "ask")
        ranks.links[rank].send({"kind": "answer", "answer": RankProgress(rank, HangLimits(1, 1, 1)).status().as_json()})
    _next(ranks.links[2], "wait")
    ending = ranks.end_of(0)
    assert (ending.first, ending.ended_by) == ((1,), {})
    assert LOSSY in ending.line
