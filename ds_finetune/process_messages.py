"""Messages between processes: one JSON object per line, whose kind and fields are checked where it is read.

A message is a frozen dataclass that names its kind:

    @dataclass(frozen=True)
    class WriteJob(ProcessMessage, kind="write"):
        part: str
        num_bytes: int

`encode` makes the line, `decode` the message; `send` and `MessageReader` do both over a file descriptor, which may be
that of a pipe, a socket or a file. Fields are plain values: None, bool, int, float, str, Any, unions, lists, tuples,
dictionaries with text as keys, named tuples and other dataclasses.

The module needs the standard library alone, because programs that must start within a fraction of a second use it.
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
"""Bytes of the longest line that is read, unless the reader sets another limit."""
_READ_BYTES = 2**16


@dataclass(frozen=True)
class ProcessMessage:
    """What one process tells another; each subclass names its `kind`, which is sent with its fields."""

    kind: ClassVar[str]

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind


M = TypeVar("M", bound=ProcessMessage)


class MessageError(Exception):
    """`peer` sent a line that is no message of this program, or one longer than the limit; `reason` says why."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer} sent a message that cannot be read: {reason}")
        self.peer, self.reason = peer, reason


def encode(message: ProcessMessage, *, token: str = "") -> bytes:
    """The line of a message, with its end; a `token` before it tells it from other text in the same stream."""
    body = json.dumps({"kind": message.kind, **asdict(message)})
    return f"{token} {body}\n".lstrip(" ").encode()


def decode(line: bytes, types: Sequence[type[M]], *, peer: str) -> M:
    """The message of a line without a token, which must be one of `types`; MessageError names `peer` otherwise."""
    try:
        return _message(json.loads(line), types)
    except (ValueError, OverflowError, RecursionError) as error:
        raise MessageError(peer, str(error)) from error


def without_token(line: bytes, token: str) -> bytes | None:
    """The rest of a line that begins with `token`; None for other text, such as what a login shell prints."""
    prefix = f"{token} ".encode() if token else b""
    return line[len(prefix) :] if line.startswith(prefix) else None


def send(file: int, message: ProcessMessage, *, token: str = "") -> bool:
    """Write a message whole to a blocking file descriptor; False where the peer has closed its end."""
    rest = memoryview(encode(message, token=token))
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except ConnectionError:
        return False
    return True


class LineBuffer:
    """Bytes as they arrive, cut into lines; a line may arrive in many pieces, and many lines in one.

    MessageError, which names `peer`, once a line is longer than `max_bytes`.
    """

    def __init__(self, *, peer: str, max_bytes: int = MAX_LINE_BYTES) -> None:
        self.peer, self.max_bytes = peer, max_bytes
        self._bytes = bytearray()
        self._searched = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The lines that are complete now, without their ends; those not taken are yielded by the next call."""
        self._bytes += piece
        return self._lines()

    @property
    def rest(self) -> bytes:
        """What followed the last line that was taken."""
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
    """Messages of `types` that arrive at a file descriptor; `is_closed` once `peer` has closed its end.

    With a `token`, lines that do not begin with it are skipped; without one, every line must be a message.
    """

    def __init__(self, file: int, types: Sequence[type[M]], *, peer: str, token: str = "") -> None:
        self._file, self._types, self._token = file, types, token
        self._lines = LineBuffer(peer=peer)
        self.peer = peer
        self.is_closed = False

    def fileno(self) -> int:
        """For `select` and `poll`."""
        return self._file

    def next(self, seconds: float | None = None) -> M | None:
        """The next message; None after `seconds`, where given, or once the peer has closed its end.

        MessageError for a line that is no message of `types`; the line is dropped.
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
    """Values of a dataclass's fields from JSON; ValueError says which is missing, unknown or of another type."""
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
    """`value` of JSON as a `expected`; ValueError where it is none."""
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
    """The same for unions, tuples, lists and dictionaries, each value in them converted."""
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
    """`value` as the first type of a union that it fits."""
    for expected in get_args(union):
        with suppress(ValueError):
            return _value(expected, value, where)
    raise _wrong_type(union, value, where)


def _tuple(expected: Any, values: list[Any], where: str) -> Any:  # noqa: ANN401
    """A list of JSON as a tuple: of any length, of a fixed one, or a named one."""
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
