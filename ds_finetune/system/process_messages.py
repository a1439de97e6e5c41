"""Messages between processes: one JSON object per line. The reader checks its kind and the types of its fields.

A message is a frozen dataclass with a kind; the base class makes it one:

    class RunEnding(ProcessMessage, kind="ending"):
        rank: int

`encode` turns a message into a line, and `decode` a line into a message. Fields are plain values: None, bool, int,
float, str, Any, unions, lists, tuples, dictionaries with text as keys, named tuples and other dataclasses.

The module imports neither torch nor numpy, because programs that must start within a fraction of a second use it.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

from pydantic import ConfigDict, TypeAdapter, ValidationError


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
    """`peer` sent a line that is not a message of this program; `reason` says why."""

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


def _message(tree: Any, types: Sequence[type[M]]) -> M:  # noqa: ANN401 - any JSON
    """The message that `tree` describes; ValueError where it describes none of `types`."""
    kind = tree.pop("kind", None) if isinstance(tree, dict) else None
    chosen: type | None = next((each for each in types if each.kind == kind), None)
    if chosen is None:
        raise ValueError(f"its kind is {kind!r:.100}, expected {' or '.join(each.kind for each in types)}")
    try:
        # As JSON, since only there a list may be a tuple although types are strict.
        message: M = _adapter_of(chosen).validate_json(json.dumps(tree), strict=True)
    except ValidationError as invalid:
        error = invalid.errors()[0]
        where = ".".join(map(str, (kind, *error["loc"])))
        raise ValueError(f"`{where}` is {error['input']!r:.100}: {error['msg']}") from None
    return message


_adapter_of = functools.cache(TypeAdapter)
