"""Messages between processes over real pipes and sockets: framing, types, limits, and a peer that closes."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from ds_finetune.system.process_messages import (
    LineBuffer,
    MessageError,
    MessageReader,
    ProcessMessage,
    decode,
    encode,
    send,
)
from tests.conftest import ROOT


class Point(NamedTuple):
    """A named tuple."""

    x: int
    y: float


@dataclass(frozen=True)
class Nested:
    """A dataclass inside a message."""

    name: str
    points: tuple[Point, ...] = ()


class Everything(ProcessMessage, kind="everything"):
    """A field of each type."""

    number: int
    ratio: float
    is_there: bool
    nested: Nested | None
    pair: tuple[int, str]
    names: list[str]
    counts: Mapping[str, int]
    value: Any = None
    rest: dict[str, list[tuple[int, str]]] = field(default_factory=dict)


class Short(ProcessMessage, kind="short"):
    """One field."""

    text: str


TYPES: list[type[ProcessMessage]] = [Everything, Short]
MESSAGE = Everything(
    3, 0.5, True, Nested("a", (Point(1, 2.0),)), (4, "b"), ["c"], {"d": 5}, [None, {}], {"0": [(6, "e")]}
)
PEER = "rank 7"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe to read from and to write to."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_message_comes_back_with_its_types() -> None:
    line = encode(MESSAGE)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line, TYPES, peer=PEER) == MESSAGE
    assert decode(encode(Short("two\nlines")), [Short], peer=PEER).text == "two\nlines"
    assert decode(b'{"kind": "everything", "number": 1, "ratio": 2, "is_there": false, "nested": null, '
                  b'"pair": [1, ""], "names": [], "counts": {}}', TYPES, peer=PEER) == Everything(
        1, 2.0, False, None, (1, ""), [], {}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"Welcome to this machine", "Expecting value"),
        (b"\xff\xfe{", "can't decode"),
        (b"[" * 50_000, "recursion"),
        (b"[1]", "its kind is None, expected everything or short"),
        (b'{"text": "a"}', "its kind is None"),
        (b'{"kind": ["short"], "text": "a"}', "its kind is ['short']"),
        (b'{"kind": "long", "text": "a"}', "its kind is 'long', expected everything or short"),
        (b'{"kind": "short"}', "`short.text` is {}: Field required"),
        (b'{"kind": "short", "text": "a", "more": 1}', "`short.more` is 1: Unexpected"),
        (b'{"kind": "short", "text": 3}', "`short.text` is 3: Input should be a valid string"),
        (b'{"kind": "short", "text": null}', "`short.text` is None: Input should be a valid string"),
    ],
)
def test_what_is_no_message_is_refused_in_the_name_of_its_sender(line: bytes, reason: str) -> None:
    with pytest.raises(MessageError) as refused:
        decode(line, TYPES, peer=PEER)
    assert reason in refused.value.reason
    assert str(refused.value).startswith("rank 7 sent a message that cannot be read: ")
    assert refused.value.peer == PEER


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"number": True}, "everything.number` is True: Input should be a valid integer"),
        ({"number": 1.0}, "everything.number` is 1.0: Input should be a valid integer"),
        ({"ratio": "1"}, "everything.ratio` is '1': Input should be a valid number"),
        ({"is_there": 1}, "everything.is_there` is 1: Input should be a valid boolean"),
        ({"nested": {}}, "everything.nested.name` is {}"),
        ({"nested": {"name": "a", "points": [[1]]}}, "everything.nested.points.0.1` is [1]: Field required"),
        ({"pair": [1, "a", 2]}, "everything.pair` is [1, 'a', 2]: Tuple should have at most 2 items"),
        ({"pair": {"0": 1}}, "everything.pair` is {'0': 1}"),
        ({"names": "abc"}, "everything.names` is 'abc': Input should be a valid array"),
        ({"names": ["a", 1]}, "everything.names.1` is 1: Input should be a valid string"),
        ({"counts": [["d", 5]]}, "everything.counts` is"),
        ({"counts": {"d": "5"}}, "everything.counts.d` is '5': Input should be a valid integer"),
        ({"rest": {"0": [[6, 7]]}}, "everything.rest.0.0.1` is 7: Input should be a valid string"),
    ],
    ids=str,
)
def test_every_field_has_its_declared_type(change: dict[str, Any], reason: str) -> None:
    tree = json.loads(encode(MESSAGE)) | change
    with pytest.raises(MessageError) as refused:
        decode(json.dumps(tree).encode(), TYPES, peer=PEER)
    assert reason in refused.value.reason


def test_lines_are_cut_wherever_the_bytes_were() -> None:
    buffer = LineBuffer(peer=PEER)
    assert list(buffer.feed(b"one\ntw")) == [b"one"]
    assert list(buffer.feed(b"")) == []
    assert list(buffer.feed(b"o\nthree\n\nfo")) == [b"two", b"three", b""]
    assert list(buffer.feed(b"ur\n")) == [b"four"]


def test_lines_that_are_not_taken_stay() -> None:
    buffer = LineBuffer(peer=PEER)
    assert next(buffer.feed(b"one\ntwo\n")) == b"one"
    assert list(buffer.feed(b"three\n")) == [b"two", b"three"]


@pytest.mark.parametrize("sent", [b"ok\n" + b"x" * 9, b"ok\n" + b"x" * 9 + b"\n"], ids=["without end", "with end"])
def test_a_line_beyond_the_limit_is_refused_after_those_before_it(sent: bytes) -> None:
    lines = LineBuffer(peer=PEER, max_bytes=8).feed(sent)
    assert next(lines) == b"ok"
    with pytest.raises(MessageError, match=r"rank 7 sent .* at least 9 bytes, at most 8"):
        next(lines)


def test_a_reader_gives_one_message_after_the_other(pipe: tuple[int, int]) -> None:
    reader = MessageReader(pipe[0], TYPES, peer=PEER)
    assert reader.next(0) is None
    os.write(pipe[1], encode(Short("one")) + encode(MESSAGE) + encode(Short("three"))[:5])
    assert reader.next() == Short("one")
    assert reader.next(0) == MESSAGE
    assert reader.next(0.05) is None
    os.write(pipe[1], encode(Short("three"))[5:])
    assert reader.next() == Short("three")
    assert not reader.is_closed


def test_a_line_that_is_no_message_is_dropped_and_the_next_one_read(pipe: tuple[int, int]) -> None:
    reader = MessageReader(pipe[0], [Short], peer=PEER)
    os.write(pipe[1], b"nonsense\n" + encode(Short("next")))
    with pytest.raises(MessageError):
        reader.next()
    assert reader.next() == Short("next")


def test_a_peer_that_closes_is_noticed_by_both_sides() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            assert send(theirs.fileno(), Short("last"))
            theirs.sendall(b'{"kind": "sho')
        reader = MessageReader(ours.fileno(), TYPES, peer=PEER)
        assert reader.next() == Short("last")
        assert reader.next() is None
        assert reader.is_closed
        assert reader.next(0) is None
        assert not send(ours.fileno(), Short("too late"))


def test_a_message_larger_than_the_pipe_is_sent_whole(pipe: tuple[int, int]) -> None:
    message = Short("x" * 1_000_000)
    thread = threading.Thread(target=send, args=(pipe[1], message))
    thread.start()
    assert MessageReader(pipe[0], [Short], peer=PEER).next() == message
    thread.join()


def test_the_module_needs_no_package_that_starts_slowly() -> None:
    code = "import sys, ds_finetune.system.process_messages; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "deepspeed"} & set(done.stdout.split())
