"""Lines to the hub over real sockets: what one rank's end means to the others."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ds_finetune.watch.board import Board, Patience
from ds_finetune.watch.hub import ECHO_SECONDS, REPORT, Hub
from ds_finetune.watch.report import Ending, Failure, Member
from ds_finetune.watch.stacks import FOLDER
from ds_finetune.watch.wire import Link, Message, listen, waiting

SECONDS = 12.0
TOKEN = "secret"


class Ranks:
    """A hub and as many lines to it as ranks."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        listener = listen(here_alone=True)
        self.port = listener.getsockname()[1]
        self.folder = folder
        self.hub = Hub(listener, TOKEN, size, folder)
        self.hub.start()
        self.links = [self.join(rank) for rank in range(size)]
        until(lambda: len(self.hub._members) == size)

    def join(self, rank: int, token: str = TOKEN) -> Link:
        link = Link.to("127.0.0.1", self.port, timeout=SECONDS)
        link.send({"token": token, "member": asdict(Member(rank, f"host-{rank}", 4000 + rank, "1", "here"))})
        return link

    def end_of(self, rank: int) -> Ending:
        return Ending.from_json(_next(self.links[rank], "end")["ending"])

    def report(self) -> str:
        """Written after the ranks are told, rank zero last."""
        until(lambda: (self.folder / FOLDER / REPORT).exists())
        return (self.folder / FOLDER / REPORT).read_text()


def until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.01)


def _next(link: Link, kind: str) -> Message:
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        for message in link.received() if waiting([link], 1.0) else []:
            if message["kind"] == kind:
                return message
    raise AssertionError(f"no `{kind}` within {SECONDS} s")


def _failed(line: str, *, is_echo: bool, code: int = 1) -> Message:
    return {"kind": "failed", "failure": asdict(Failure(line, f"where\n{line}", code, is_echo))}


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
        assert "rank 1 (host host-1, process 4001) ended without a word" in ending.line
    assert time.monotonic() - began < 2
    assert "rank 1" in ranks.report()


def test_the_first_failure_is_the_cause_and_its_code_everyones(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.links[2].send(_failed("ModelError: no weights", is_echo=False, code=7))
    ending = ranks.end_of(1)
    ranks.links[0].send(_failed("KeyError: later", is_echo=False))
    assert (ending.first, ending.code) == ((2,), 7)
    assert "ModelError: no weights" in ranks.report()
    assert "later" not in ranks.report()


def test_a_users_mistake_leaves_no_report(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.links[2].send(_failed("DataError: a row", is_echo=False, code=2))
    assert ranks.end_of(0).code == 2
    assert list(tmp_path.iterdir()) == []


def test_an_echo_waits_for_its_cause(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.links[0].send(_failed("RuntimeError: gloo: Connection closed by peer", is_echo=True))
    time.sleep(ECHO_SECONDS / 2)
    ranks.links[1].send(_failed("OSError: No space left on device", is_echo=False))
    assert ranks.end_of(0).first == (1,)


def test_an_echo_without_a_cause_asks_everyone(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, size=2)
    ranks.links[0].send(_failed("RuntimeError: gloo: 24 vs 16", is_echo=True))
    for rank in (0, 1):
        _next(ranks.links[rank], "ask")
        board = Board(rank, Patience(1, 1, 1))
        board.enter("all_reduce", 3 if rank else 2, "all")
        ranks.links[rank].send({"kind": "answer", "answer": board.answer().as_json()})
    report = ranks.end_of(1).report
    assert "rank 0 all_reduce of 2; rank 1 all_reduce of 3" in report
    assert "24 vs 16" in report


def test_who_does_not_answer_is_ended_by_one_beside_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.links[0].send({"kind": "still", "why": "  rank 0 has made no progress"})
    for rank in (0, 2):
        _next(ranks.links[rank], "ask")
        ranks.links[rank].send({"kind": "answer", "answer": Board(rank, Patience(1, 1, 1)).answer().as_json()})
    ending = ranks.end_of(0)
    assert ending.first == (1,)
    assert ending.ended_by == {"0": [[4001, "1"]]}
    assert "rank 1 (host host-1, process 4001): no answer" in ending.report


def test_a_stranger_is_not_heard(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    stranger = ranks.join(1, token="guess")
    stranger.send(_failed("KeyError: not mine", is_echo=False))
    until(lambda: stranger.received() == [] and stranger.is_lost)
    ranks.links[1].send(_failed("OSError: mine", is_echo=False))
    assert "mine" in ranks.end_of(0).line
    assert "not mine" not in ranks.report()
