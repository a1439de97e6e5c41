"""Messages between processes: one JSON object per line. The reader checks its kind and the types of its fields.

A message is a frozen dataclass with a kind:

    @dataclass(frozen=True)
    class WriteJob(ProcessMessage, kind="write"):
        part: str
        num_bytes: int

`encode` turns a message into a line, and `decode` a line into a message. `send` and `MessageReader` do this over a file
descriptor of a pipe, a socket or a file. Fields are plain values: None, bool, int, float, str, Any, unions, lists,
tuples, dictionaries with text as keys, named tuples and other dataclasses.

The module imports only the standard library, because programs that must start within a fraction of a second use it.
"""

import functools
import json
import os
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, ClassVar, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

MAX_LINE_BYTES = 2**22
"""Maximum bytes of a line, unless the reader sets another limit."""
_READ_BYTES = 2**16


@dataclass(frozen=True)
class ProcessMessage:
    """Base class of messages. Each subclass has a `kind`, which is sent with its fields."""

    kind: ClassVar[str]

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind


M = TypeVar("M", bound=ProcessMessage)


class MessageError(Exception):
    """`peer` sent a line that is not a message of this program or exceeds the limit; `reason` says which."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer} sent a message that cannot be read: {reason}")
        self.peer, self.reason = peer, reason


def encode(message: ProcessMessage, *, token: str = "") -> bytes:
    """The line of a message, including the newline. A `token` before it marks it among other text in the stream."""
    body = json.dumps({"kind": message.kind, **asdict(message)})
    return f"{token} {body}\n".lstrip(" ").encode()


def decode(line: bytes, types: Sequence[type[M]], *, peer: str) -> M:
    """The message in a line without a token; MessageError, which names `peer`, if it is not one of `types`."""
    try:
        return _message(json.loads(line), types)
    except (ValueError, OverflowError, RecursionError) as error:
        raise MessageError(peer, str(error)) from error


def without_token(line: bytes, token: str) -> bytes | None:
    """The line after its `token`; None for other text, such as the output of a login shell."""
    prefix = f"{token} ".encode() if token else b""
    return line[len(prefix) :] if line.startswith(prefix) else None


def send(file: int, message: ProcessMessage, *, token: str = "") -> bool:
    """Write a whole message to a blocking file descriptor; False if the peer has closed its end."""
    rest = memoryview(encode(message, token=token))
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

    @property
    def rest(self) -> bytes:
        """The bytes after the last line that was taken."""
        return bytes(self._bytes)

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
    """Reads messages of `types` from a file descriptor; `is_closed` becomes true once `peer` has closed its end.

    With a `token`, lines that do not begin with it are skipped; without one, every line must be a message.
    """

    def __init__(self, file: int, types: Sequence[type[M]], *, peer: str, token: str = "") -> None:
        self._file, self._types, self._token = file, types, token
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
        for line in self._lines.feed(b""):
            body = without_token(line, self._token)
            if body is not None:
                return decode(body, self._types, peer=self.peer)
        return None

    def _is_readable(self, until: float | None) -> bool:
        poll = select.poll()
        poll.register(self._file, select.POLLIN)
        return bool(poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000))


def _message(tree: Any, types: Sequence[type[M]]) -> M:  # noqa: ANN401 - any JSON
    """The message that `tree` describes; ValueError where it describes none of `types`."""
    kind = tree.pop("kind", None) if isinstance(tree, dict) else None
    for each in types:
        if each.kind == kind:
            return each(**_fields_of(each, tree, each.kind))
    raise ValueError(f"its kind is {kind!r:.100}, expected {' or '.join(each.kind for each in types)}")


def _fields_of(expected: type, tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values of a dataclass's fields from JSON; ValueError names a missing or unknown field, or one of a wrong type."""
    types = _hints(expected)
    known = {field.name: field for field in fields(expected)}
    unknown = sorted(tree.keys() - known.keys())
    missing = [
        name
        for name, field in known.items()
        if name not in tree and field.default is MISSING and field.default_factory is MISSING
    ]
    if unknown or missing:
        raise ValueError(f"`{where}` misses {missing or 'nothing'} and has the unknown fields {unknown or 'none'}")
    return {name: _value(types[name], value, f"{where}.{name}") for name, value in tree.items()}


@functools.cache
def _hints(expected: type) -> dict[str, Any]:
    return get_type_hints(expected)


def _value(expected: Any, value: Any, where: str) -> Any:  # noqa: ANN401 - a type as it is annotated, and plain values
    """Convert the JSON value `value` to the type `expected`; ValueError where it does not fit."""
    if expected is Any or type(value) is expected:
        return value
    if get_origin(expected) is not None or hasattr(expected, "_fields"):
        return _collection(expected, value, where)
    if is_dataclass(expected) and isinstance(expected, type) and isinstance(value, dict):
        return expected(**_fields_of(expected, value, where))
    if expected is float and type(value) is int:
        return float(value)
    raise _wrong_type(expected, value, where)


def _collection(expected: Any, value: Any, where: str) -> Any:  # noqa: ANN401
    """`_value` for unions, tuples, lists and dictionaries; converts each value in them."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        return _first_fit(expected, value, where)
    if isinstance(value, list) and (origin is tuple or hasattr(expected, "_fields")):
        return _tuple(expected, value, where)
    if isinstance(value, list) and issubclass(list, origin):
        return [_value(arguments[0], each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, dict) and issubclass(dict, origin):
        return {key: _value(arguments[1], each, f"{where}[{key!r:.100}]") for key, each in value.items()}
    raise _wrong_type(expected, value, where)


def _first_fit(union: Any, value: Any, where: str) -> Any:  # noqa: ANN401
    """Convert `value` to the first type of a union that it fits."""
    for expected in get_args(union):
        with suppress(ValueError):
            return _value(expected, value, where)
    raise _wrong_type(union, value, where)


def _tuple(expected: Any, values: list[Any], where: str) -> Any:  # noqa: ANN401
    """Convert a JSON list to a tuple: of any length, of fixed length, or a named tuple."""
    is_named = hasattr(expected, "_fields")
    item_types = tuple(_hints(expected).values()) if is_named else get_args(expected)
    if len(item_types) == 2 and item_types[1] is Ellipsis:
        item_types = (item_types[0],) * len(values)
    if len(values) != len(item_types):
        raise _wrong_type(expected, values, where)
    items = [
        _value(each, item, f"{where}[{index}]")
        for index, (each, item) in enumerate(zip(item_types, values, strict=True))
    ]
    return expected(*items) if is_named else tuple(items)


def _wrong_type(expected: Any, value: Any, where: str) -> ValueError:  # noqa: ANN401
    name = str(expected) if get_origin(expected) else expected.__name__
    return ValueError(f"`{where}` is {value!r:.100}, expected {name}")
