"""Messages between the launching program and its guards, and between a guard and its ranks: one JSON object a line."""

import json
from typing import Any

Message = dict[str, Any]


def packed(**message: object) -> bytes:
    """A message as a line."""
    return json.dumps(message).encode() + b"\n"


class Lines:
    """Bytes as they arrive, cut into lines; a line may come in many pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[str]:
        """The lines that are whole now, without their ends."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def rest(self) -> str:
        """What came after the last end of a line."""
        return self._rest.decode(errors="replace")


def unpacked(line: str, *, to: str = "") -> Message | None:
    """A message, or None for a line that is none, such as what a login shell prints.

    With `to` it must carry that word: a shell may print what looks like a message.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("to", "") == to else None
