"""Messages between processes: the types of their fields, and lines that are no message."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from ds_finetune.system.process_messages import MessageError, ProcessMessage, decode, encode
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


def test_the_module_needs_no_package_that_starts_slowly() -> None:
    code = "import sys, ds_finetune.system.process_messages; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "deepspeed"} & set(done.stdout.split())
