"""Messages between processes: one JSON object per line. The reader checks its kind and the types of its fields.

A message is a frozen dataclass with a kind; the base class makes it one:

    class WriteJob(ProcessMessage, kind="write"):
        part: str
        num_bytes: int

`encode` turns a message into a line, and `decode` a line into a message. `send` and `MessageReader` do this over a file
descriptor of a pipe, a socket or a file. Fields are plain values: None, bool, int, float, str, Any, unions, lists,
tuples, dictionaries with text as keys, named tuples and other dataclasses.

The module imports neither torch nor numpy, because programs that must start within a fraction of a second use it.
"""

import functools
import json
import os
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar, dataclass_transform

from pydantic import ConfigDict, TypeAdapter, ValidationError

MAX_LINE_BYTES = 2**22
"""Maximum bytes of a line, unless the reader sets another limit."""
_READ_BYTES = 2**16


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class ProcessMessage:
    """Base class of messages. Each subclass is a frozen dataclass with a `kind`, which is sent with its fields."""

    kind: ClassVar[str]
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind
        dataclass(frozen=True)(cls)


M = TypeVar("M", bound=ProcessMessage)


class MessageError(Exception):
    """`peer` sent a line that is not a message of this program or exceeds the limit; `reason` says which."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer} sent a message that cannot be read: {reason}")
        self.peer, self.reason = peer, reason


def encode(message: ProcessMessage) -> bytes:
    """The line of a message, including the newline."""
    return json.dumps({"kind": message.kind, **asdict(message)}).encode() + b"\n"


def decode(line: bytes, types: Sequence[type[M]], *, peer: str) -> M:
    """The message in a line; MessageError, which names `peer`, if it is not one of `types`."""
    try:
        return _message(json.loads(line), types)
    except (ValueError, OverflowError, RecursionError) as error:
        raise MessageError(peer, str(error)) from error


def send(file: int, message: ProcessMessage) -> bool:
    """Write a whole message to a blocking file descriptor; False if the peer has closed its end."""
    rest = memoryview(encode(message))
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except ConnectionError:
        return False
    return True


class LineBuffer:
    """Cuts arriving bytes into lines; a piece of bytes may hold a fraction of a line, or several lines.

    MessageError, which names `peer`, if a line is longer than `max_bytes`.
    """

    def __init__(self, *, peer: str, max_bytes: int = MAX_LINE_BYTES) -> None:
        self.peer, self.max_bytes = peer, max_bytes
        self._bytes = bytearray()
        self._searched = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Add `piece`, and yield complete lines without newlines; the next call yields those not taken."""
        self._bytes += piece
        return self._lines()

    def _lines(self) -> Iterator[bytes]:
        while (end := self._bytes.find(b"\n", self._searched)) >= 0:
            self._check(end)
            line = bytes(self._bytes[:end])
            del self._bytes[: end + 1]
            self._searched = 0
            yield line
        self._searched = len(self._bytes)
        self._check(self._searched)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise MessageError(
                self.peer, f"its line has at least {num_bytes:,} bytes, at most {self.max_bytes:,} may be"
            )


class MessageReader(Generic[M]):
    """Reads messages of `types` from a file descriptor; `is_closed` becomes true once `peer` has closed its end."""

    def __init__(self, file: int, types: Sequence[type[M]], *, peer: str) -> None:
        self._file, self._types = file, types
        self._lines = LineBuffer(peer=peer)
        self.peer = peer
        self.is_closed = False

    def fileno(self) -> int:
        """The file descriptor, for `select` and `poll`."""
        return self._file

    def next(self, seconds: float | None = None) -> M | None:
        """The next message; None if none arrives within `seconds` (None: no limit) or the peer has closed its end.

        MessageError for a line that is not a message of `types`; the line is dropped.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while (message := self._next_buffered()) is None and not self.is_closed:
            if not self._is_readable(until):
                return None
            try:
                piece = os.read(self._file, _READ_BYTES)
            except ConnectionError:
                piece = b""
            self.is_closed = not piece
            self._lines.feed(piece)
        return message

    def _next_buffered(self) -> M | None:
        line = next(self._lines.feed(b""), None)
        return None if line is None else decode(line, self._types, peer=self.peer)

    def _is_readable(self, until: float | None) -> bool:
        poll = select.poll()
        poll.register(self._file, select.POLLIN)
        return bool(poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000))


def _message(tree: Any, types: Sequence[type[M]]) -> M:  # noqa: ANN401 - any JSON
    """The message that `tree` describes; ValueError where it describes none of `types`."""
    kind = tree.pop("kind", None) if isinstance(tree, dict) else None
    chosen: type | None = next((each for each in types if each.kind == kind), None)
    if chosen is None:
        raise ValueError(f"its kind is {kind!r:.100}, expected {' or '.join(each.kind for each in types)}")
    try:
        # As JSON, since only there a list may be a tuple although types are strict.
        message: M = _reader(chosen).validate_json(json.dumps(tree), strict=True)
    except ValidationError as invalid:
        error = invalid.errors()[0]
        where = ".".join(map(str, (kind, *error["loc"])))
        raise ValueError(f"`{where}` is {error['input']!r:.100}: {error['msg']}") from None
    return message


@functools.cache
def _reader(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
