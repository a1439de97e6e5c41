"""The coordinator over real sockets: what the end of one rank means for the others."""

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from ds_finetune.cluster.watchdog import coordinator as module
from ds_finetune.cluster.watchdog.connection import (
    MALFORMED,
    UNREACHABLE,
    Connection,
    listen,
    wait_readable,
)
from ds_finetune.cluster.watchdog.coordinator import REPORT, Coordinator
from ds_finetune.cluster.watchdog.diagnosis import LOSSY
from ds_finetune.cluster.watchdog.kills import FOLDER, record_kill, stacks_path
from ds_finetune.cluster.watchdog.messages import (
    FailureReport,
    HangReport,
    RankGoodbye,
    RankLeaving,
    RankProcess,
    RankRefused,
    RunEnding,
    StatusRequest,
)
from ds_finetune.cluster.watchdog.progress import HangLimits, RankProgress
from ds_finetune.system.process_messages import ProcessMessage
from ds_finetune.system.processes import Pause, PauseDetector

SECONDS = 30.0
SECRET = b"of this run"
M = TypeVar("M", bound=ProcessMessage)


class Ranks:
    """A coordinator and a connection to it for each rank."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        listener = listen("127.0.0.1")
        self.port = listener.getsockname()[1]
        self.folder = folder
        self.coordinator = Coordinator(listener, SECRET, size, folder)
        self.coordinator.start()
        self.connections = [self.join(rank) for rank in range(size)]
        until(lambda: len(self.coordinator._processes) == size)

    def join(self, rank: int, secret: bytes = SECRET, host: str = "") -> Connection:
        connection = Connection.open("127.0.0.1", self.port, secret, timeout=SECONDS)
        connection.send(RankProcess(rank, host or f"host-{rank}", 4000 + rank, "1", "here"))
        return connection

    def end_of(self, rank: int) -> RunEnding:
        return _next(self.connections[rank], RunEnding)

    def report(self) -> str:
        """Written after the ranks are told, rank zero last."""
        until(lambda: (self.folder / FOLDER / REPORT).exists())
        return (self.folder / FOLDER / REPORT).read_text()


def until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.01)


def _next(connection: Connection, kind: type[M]) -> M:
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        for message in connection.receive() if wait_readable([connection], 1.0) else []:
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind.__name__} within {SECONDS} s")


def _failed(line: str, *, is_secondary: bool, code: int = 1) -> FailureReport:
    return FailureReport(line, f"where\n{line}", code, is_secondary)


def test_goodbyes_end_the_coordinator_without_a_report(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for connection in ranks.connections:
        connection.send(RankGoodbye())
    ranks.coordinator.join(SECONDS)
    assert not ranks.coordinator.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_a_connection_that_breaks_ends_the_others_at_once(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.connections[1].close()
    for rank in (0, 2):
        ending = ranks.end_of(rank)
        assert (ending.at_fault, ending.code, ending.reporter) == ((1,), 1, 0)
        assert "rank 1 (host host-1, process 4001) ended without a message" in ending.line
    assert "rank 1" in ranks.report()


def test_the_first_failure_is_the_cause_and_its_code_everyones(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.connections[2].send(_failed("ModelError: no weights", is_secondary=False, code=7))
    ending = ranks.end_of(1)
    ranks.connections[0].send(_failed("KeyError: later", is_secondary=False))
    assert (ending.at_fault, ending.code) == ((2,), 7)
    assert "ModelError: no weights" in ranks.report()
    assert "later" not in ranks.report()


def test_a_users_mistake_leaves_no_report(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.connections[2].send(_failed("DataError: a row", is_secondary=False, code=2))
    assert ranks.end_of(0).code == 2
    assert list(tmp_path.iterdir()) == []


def test_an_echo_waits_for_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDARY_ERROR_SECONDS", SECONDS)
    ranks = Ranks(tmp_path)
    ranks.connections[0].send(_failed("RuntimeError: gloo: Connection closed by peer", is_secondary=True))
    until(lambda: 0 in ranks.coordinator._secondary_failures)
    ranks.connections[1].send(_failed("OSError: No space left on device", is_secondary=False))
    assert ranks.end_of(0).at_fault == (1,)


def test_an_echo_without_a_cause_asks_everyone(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, size=2)
    ranks.connections[0].send(_failed("RuntimeError: gloo: 24 vs 16", is_secondary=True))
    for rank in (0, 1):
        _next(ranks.connections[rank], StatusRequest)
        progress = RankProgress(rank, HangLimits(1, 1, 1))
        progress.enter("all_reduce", 3 if rank else 2, "all")
        ranks.connections[rank].send(progress.status())
    report = ranks.end_of(1).report
    assert "rank 0 all_reduce of 2; rank 1 all_reduce of 3" in report
    assert "24 vs 16" in report


def test_who_does_not_answer_is_ended_by_one_beside_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.connections[0].send(HangReport("  rank 0 has made no progress"))
    for rank in (0, 2):
        _next(ranks.connections[rank], StatusRequest)
        ranks.connections[rank].send(RankProgress(rank, HangLimits(1, 1, 1)).status())
    ending = ranks.end_of(0)
    assert ending.at_fault == (1,)
    assert ending.killers == {"0": [(4001, "1")]}
    assert "rank 1 (host host-1, process 4001): no answer" in ending.report


def test_a_pause_of_rank_zero_moves_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that were asked for their status before the pause are not said to be silent after it."""
    pauses = PauseDetector()
    monkeypatch.setattr(pauses, "last_pause", lambda: found.pop() if found else None)
    found: list[Pause] = []
    ranks = Ranks(tmp_path)
    ranks.coordinator._pauses = pauses
    ranks.connections[0].send(HangReport("no progress"))
    _next(ranks.connections[2], StatusRequest)
    asked = ranks.coordinator._status_round
    assert asked is not None
    before = asked.until
    found.append(Pause(100.0, 90.0, is_of_process=True))
    until(lambda: asked.until == before + 90.0)
    assert ranks.coordinator._ending is None


def test_a_stranger_is_not_heard(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    stranger = ranks.join(1, secret=b"guess")
    stranger.send(_failed("KeyError: not mine", is_secondary=False))
    until(lambda: stranger.receive() == [] and stranger.is_lost)
    ranks.connections[1].send(_failed("OSError: mine", is_secondary=False))
    assert "mine" in ranks.end_of(0).line
    assert "not mine" not in ranks.report()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (replace(_failed("", is_secondary=False), line=1), "`failed.line` is 1: Input should be a valid string"),
        (RankLeaving(None), "`leaving.why` is None: Input should be a valid string"),
        (RankRefused("sent by coordinators alone"), "its kind is 'refused'"),
    ],
)
def test_a_message_that_cannot_be_read_ends_the_run_and_not_the_coordinator(
    message: ProcessMessage, reason: str, tmp_path: Path
) -> None:
    ranks = Ranks(tmp_path)
    ranks.connections[0].send(HangReport("no progress"))
    _next(ranks.connections[1], StatusRequest)
    ranks.connections[1].send(message)
    ending = ranks.end_of(0)
    assert ending.at_fault == (1,)
    assert f"rank 1 (host host-1, process 4001) {MALFORMED} ({reason}" in ending.line


def test_bytes_of_a_stranger_do_not_end_the_coordinator(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for sent in (b'{"token": "x", "rank": []}\n', b"\xff" * 10_000, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", ranks.port)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(sent)
            while stranger.recv(1024):
                pass
    ranks.connections[2].send(_failed("OSError: mine", is_secondary=False))
    assert ranks.end_of(0).at_fault == (2,)


def test_idle_connections_are_dismissed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPARE_CONNECTIONS", 5)
    ranks = Ranks(tmp_path)
    idle = [socket.create_connection(("127.0.0.1", ranks.port), timeout=SECONDS) for _ in range(40)]
    until(lambda: len(ranks.coordinator._unidentified) == 8)
    # The oldest are gone, and a rank is heard all the same.
    assert idle[0].recv(1024, socket.MSG_WAITALL) is not None
    ranks.connections[1].send(_failed("OSError: mine", is_secondary=False))
    assert ranks.end_of(0).at_fault == (1,)
    for each in idle:
        each.close()


def test_a_connection_that_stays_silent_is_dismissed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNIDENTIFIED_SECONDS", 0.3)
    ranks = Ranks(tmp_path)
    with socket.create_connection(("127.0.0.1", ranks.port), timeout=SECONDS) as idle:
        while idle.recv(1024):
            pass
    until(lambda: ranks.coordinator._unidentified == [])


def test_a_rank_is_taken_once(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for rank, why in ((1, "rank 1 (host host-1, process 4001) is already here"), (3, "cannot be one of 3 ranks")):
        assert why in _next(ranks.join(rank), RankRefused).why
    ranks.connections[1].send(_failed("OSError: mine", is_secondary=False))
    assert ranks.end_of(0).at_fault == (1,)


def test_a_rank_that_leaves_states_its_reason(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.connections[1].send(RankLeaving("called os._exit(3) at x.py:7"))
    ranks.connections[1].close_after_reading()
    assert ranks.end_of(0).line == "rank 1 (host host-1, process 4001) called os._exit(3) at x.py:7"


def test_memory_is_named_where_the_kernel_has_counted_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [4]
    monkeypatch.setattr(module.kills, "oom_kills", lambda: counted[0])
    ranks = Ranks(tmp_path)
    ranks.connections[1].close()
    assert "memory" not in ranks.end_of(0).line
    ranks = Ranks(tmp_path)
    counted[0] = 5
    ranks.connections[1].close()
    assert "the kernel has killed 1 processes of its machine for lack of memory" in ranks.end_of(0).line


def test_a_kill_by_the_program_is_marked_as_such(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    record_kill(tmp_path / FOLDER, 4001, "1", "rank 1: does not answer")
    ranks.connections[1].close()
    assert (
        "rank 1 (host host-1, process 4001) was ended by the watchdog: rank 1: does not answer" in ranks.end_of(0).line
    )


def test_a_rank_that_its_own_timer_ended_held_the_lock(tmp_path: Path) -> None:
    stacks = stacks_path(tmp_path / FOLDER, 1)
    stacks.parent.mkdir()
    stacks.write_text("Timeout (0:00:20)!\nof the run before\n")
    ranks = Ranks(tmp_path)
    ranks.connections[2].close()
    assert "Python's lock" not in ranks.end_of(0).line
    ranks = Ranks(tmp_path)
    with stacks.open("a") as file:
        file.write("Timeout (0:00:20)!\n")
    ranks.connections[1].close()
    assert "native code held Python's lock beyond the limit" in ranks.end_of(0).line


def _cut(ranks: Ranks, rank: int) -> None:
    """What the kernel's probes do to a connection over which nothing comes any more."""
    ranks.coordinator._connections[rank].why_lost = UNREACHABLE
    ranks.connections[rank].close()


def test_a_rank_behind_a_lossy_network_is_not_called_dead(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    _cut(ranks, 1)
    ending = ranks.end_of(0)
    assert ending.at_fault == (1,)
    assert UNREACHABLE in ending.line
    assert "as seen from rank 0 (host host-0)" in ending.line
    assert ending.killers == {}


def test_where_all_others_are_cut_off_it_is_rank_zero(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for rank in (1, 2):
        _cut(ranks, rank)
    ending = ranks.end_of(0)
    assert ending.at_fault == (0,)
    assert "rank 0 (host host-0) reaches none of the other 2 hosts" in ending.line


def test_a_rank_that_met_a_broken_connection_is_not_at_fault(tmp_path: Path) -> None:
    """All are in one collective; rank 1 has met an error of the network in it, and is in none when it is asked."""
    ranks = Ranks(tmp_path)
    ranks.connections[1].send(_failed("RuntimeError: gloo: Connection timed out", is_secondary=True))
    for rank in range(3):
        _next(ranks.connections[rank], StatusRequest)
        progress = RankProgress(rank, HangLimits(1, 1, 1))
        began = progress.enter("all_reduce", 2, "all")
        if rank == 1:
            progress.leave(began)
        ranks.connections[rank].send(progress.status())
    ending = ranks.end_of(0)
    assert ending.at_fault == ()
    assert "no single rank" in ending.line
    assert "the network is at fault: RuntimeError: gloo: Connection timed out" in ending.line


def test_a_rank_that_ends_after_it_met_a_broken_connection_is_not_the_first(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.connections[1].send(_failed("RuntimeError: gloo: Connection closed by peer", is_secondary=True))
    ranks.connections[1].close_after_reading()
    ranks.connections[2].send(_failed("OSError: No space left on device", is_secondary=False))
    assert ranks.end_of(0).at_fault == (2,)


def test_ranks_behind_lossy_connections_are_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATUS_SECONDS", 2.0)
    ranks = Ranks(tmp_path)
    monkeypatch.setattr(type(ranks.coordinator._connections[1]), "is_unanswered", property(lambda link: link.rank == 1))
    ranks.connections[0].send(HangReport("no progress"))
    for rank in (0, 2):
        _next(ranks.connections[rank], StatusRequest)
        ranks.connections[rank].send(RankProgress(rank, HangLimits(1, 1, 1)).status())
    ending = ranks.end_of(0)
    assert (ending.at_fault, ending.killers) == ((), {})
    assert ending.line == f"no single rank: rank 1 {LOSSY}"
