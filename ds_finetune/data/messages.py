"""One form for conversations: text contents, OpenAI's roles and tool calls, named fields; what cannot be read is
refused by name.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ds_finetune.errors import DataError

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]
ROLES = ("system", "user", "assistant", "tool")
RESERVED_CHARACTERS = "\ue0f1\ue0f2\ue0f3\ue0f4"
"""Private-use characters that stand for texts while a template is rendered; rows that hold one are refused."""
_ROLE_NAMES = {
    **{role: role for role in ROLES},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_call": "call",
    "tool_call": "call",
}
"""Roles of OpenAI's form and of ShareGPT's; the content of a `call` is a tool call in JSON."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MESSAGE_KEYS = {"role", "from", "content", "value", "tool_calls", "function_call", "weight", "name", "tool_call_id"}


@dataclass(frozen=True)
class Conversation:
    """Messages and tools in OpenAI's form: contents are texts, `arguments` JSON texts, tools have a `type`.

    `unread` names the fields of the messages that were passed over.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    unread: tuple[str, ...] = ()


def read_conversation(messages: object, tools: object, column: str, where: str) -> Conversation:
    """The messages of `column` in one form; DataError names what cannot be read or would not be trained."""
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(f"{where}: `{column}` holds {_shown(messages)}", hint="give a list of {role, content}")
    turns: list[dict[str, Any]] = []
    unread: dict[str, None] = {}
    for number, message in enumerate(messages, start=1):
        turn, unknown = _message(message, f"{where}: message {number} of `{column}`", where)
        turns.append(turn)
        unread |= dict.fromkeys(f"{column}[].{name}" for name in unknown)
    return Conversation(tuple(turns), read_tools(tools, where), tuple(unread))


def read_tools(tools: object, where: str) -> tuple[Mapping[str, Any], ...] | None:
    """Tools as a list, or as that list in JSON; each is wrapped as `{type: function, function: ...}`, as servers pass
    them on.
    """
    given = _parsed(tools, f"{where}: `tools`") if isinstance(tools, str) and tools.strip() else tools
    if not given:
        return None
    if not isinstance(given, list | tuple):
        raise DataError(f"{where}: `tools` holds {_shown(given)}", hint="give a list of tools, or that list as JSON")
    check_text(_json(given, f"{where}: `tools`"), f"{where}: `tools`")
    return tuple(_tool(tool, f"{where}: tool {number}") for number, tool in enumerate(given, start=1))


def check_text(value: object, what: str) -> str:
    """`value`, if it is a text that a tokenizer can take; `what` says where it stands."""
    if not isinstance(value, str):
        raise DataError(f"{what} holds {_shown(value)}, not text", hint="mend the row, or name another column")
    try:
        value.encode()
    except UnicodeEncodeError as lone:
        raise DataError(
            f"{what} holds the lone surrogate U+{ord(value[lone.start]):04X}, half of a character",
            hint="mend the row: the text was cut inside a UTF-16 pair",
        ) from None
    if not value.isascii() and any(mark in value for mark in RESERVED_CHARACTERS):
        mark = next(mark for mark in RESERVED_CHARACTERS if mark in value)
        raise DataError(
            f"{what} holds the private-use character U+{ord(mark):04X}",
            hint="remove it: chat templates are rendered with it",
        )
    return value


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r:.60}"


def _tool(tool: object, what: str) -> Mapping[str, Any]:
    inner = tool.get("function", tool) if isinstance(tool, dict) else tool
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise DataError(
            f"{what} holds {_shown(tool)}, which has no function with a name",
            hint="give {type: function, function: {name, ...}}",
        )
    assert isinstance(tool, dict)
    return tool if inner is not tool and "type" in tool else {"type": "function", "function": inner}


def _message(message: object, what: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """A message in one form, and its fields that were passed over."""
    if not isinstance(message, dict):
        raise DataError(f"{what} holds {_shown(message)}, not an object", hint="give a list of {role, content}")
    given = {key: value for key, value in message.items() if value is not None}
    said = given.get("role", given.get("from"))
    role = _ROLE_NAMES.get(said) if isinstance(said, str) else None
    if role is None:
        raise DataError(
            f"{where}: unknown role {said!r} in {what.removeprefix(f'{where}: ')}",
            hint=f"roles are {', '.join(_ROLE_NAMES)}",
        )
    content = given.get("content", given.get("value"))
    if role in ("assistant", "call"):
        return _assistant(given, content, is_call=role == "call", what=what)
    for key in ("tool_calls", "function_call"):
        if given.get(key):
            raise DataError(
                f"{what}: a {role} message has `{key}` {given[key]!r:.60}", hint="only assistant messages call tools"
            )
    turn = {"role": role, "content": _text(content, what)}
    turn |= {key: check_text(given[key], f"{what}: `{key}`") for key in ("name", "tool_call_id") if key in given}
    unread = [key for key in given if key not in _MESSAGE_KEYS]
    return turn, [*unread, *(["weight"] if given.get("weight") else [])]


def _assistant(
    given: Mapping[str, Any], content: object, *, is_call: bool, what: str
) -> tuple[dict[str, Any], list[str]]:
    calls = _calls(content, what) if is_call else []
    calls += _calls(given["tool_calls"], what) if given.get("tool_calls") else []
    calls += _calls(given["function_call"], what) if given.get("function_call") else []
    reasoning = next((given[key] for key in _REASONING if given.get(key)), None)
    if (content is None or is_call) and not calls:
        raise DataError(
            f"{what}: an assistant message has neither content nor tool calls: {dict(given)!r:.60}",
            hint="mend or remove the row",
        )
    text = None if is_call or content is None else _text(content, what)
    # R1's template tells a tool call by `content is none`; OpenAI's API gives an empty text as well.
    turn: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if calls:
        turn["tool_calls"] = calls
    if reasoning is not None:
        turn["reasoning_content"] = check_text(reasoning, f"{what}: the reasoning")
        if text and "</think>" in text:
            raise DataError(
                f"{what} has reasoning beside its content and `</think>` inside: {text!r:.60}",
                hint="give the reasoning once",
            )
    if _weight(given.get("weight"), what) == 0:
        turn["weight"] = 0
    unread = [key for key in given if key not in _MESSAGE_KEYS and key not in _REASONING]
    return turn, [*unread, *(["name"] if "name" in given else [])]


def _weight(weight: object, what: str) -> int:
    if weight is not None and weight not in (0, 1):
        raise DataError(
            f"{what} has weight {weight!r}", hint="an assistant message is trained (weight 1) or not (weight 0)"
        )
    return 0 if weight in (0, False) and weight is not None else 1


def _text(content: object, what: str) -> str:
    """A content as one text; text parts are joined by newlines, as vLLM joins them for templates that take texts."""
    if not isinstance(content, list | tuple):
        return check_text(content, f"{what}: the content")
    return "\n".join(_part(part, what) for part in content)


def _part(part: object, what: str) -> str:
    if isinstance(part, str):
        return check_text(part, f"{what}: a part")
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise DataError(
            f"{what} holds a part of type {kind!r}: {part!r:.60}",
            hint="only text is trained; remove rows with media or other parts",
        )
    return check_text(part.get("text"), f"{what}: a text part")


def _calls(given: object, what: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form, from a list, a single call, or either in JSON."""
    parsed = _parsed(given, f"{what}: the tool call") if isinstance(given, str) else given
    calls = parsed if isinstance(parsed, list | tuple) else [parsed]
    return [_call(call, what) for call in calls]


def _call(call: object, what: str) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    kind = (call.get("type") or "function") if isinstance(call, dict) else type(call).__name__
    if kind != "function" or not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise DataError(
            f"{what} has the tool call {_shown(call)}, which is no function with a name", hint="give {name, arguments}"
        )
    assert isinstance(call, dict)
    turn = {
        "type": "function",
        "function": {"name": check_text(inner["name"], what), "arguments": _arguments(inner, what)},
    }
    return turn | ({"id": check_text(call["id"], f"{what}: `id`")} if call.get("id") is not None else {})


def _arguments(inner: Mapping[str, Any], what: str) -> str:
    """The arguments as the JSON text of an object: that of the row where it gives a text."""
    given = inner.get("arguments", inner.get("parameters"))
    name = f"{what}: `arguments` of {inner['name']}"
    text = given if isinstance(given, str) else _json({} if given is None else given, name)
    parsed = _parsed(check_text(text, name), name) if text.strip() else {}
    if not isinstance(parsed, dict):
        raise DataError(f"{name} is {_shown(given)}, not an object", hint="give arguments by name")
    check_text(_json(parsed, name), name)
    return text if text.strip() else "{}"


def parse_json(text: str) -> Json:
    """JSON without what would change when it is written again: keys given twice, NaN and numbers out of range."""
    return json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)


def _parsed(text: str, what: str) -> Json:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as broken:
        raise DataError(f"{what} is not JSON: {broken}: {text!r:.60}", hint="mend or remove the row") from None


def _json(value: object, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as broken:
        raise DataError(
            f"{what} cannot be written as JSON: {broken}: {value!r:.60}", hint="mend or remove the row"
        ) from None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"a key is given twice in {', '.join(keys)}")
    return dict(pairs)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no finite number")
    return value


class TextChange(Protocol):
    """What becomes of a text of a message with this role."""

    def __call__(self, text: str, role: str) -> str:
        """The text instead."""
        ...


def map_texts(conversation: Conversation, change: TextChange) -> Conversation:
    """The conversation with `change(text, role)` for each of its texts; tools count as `system`."""
    messages = []
    for message in conversation.messages:
        role = message["role"]
        turn = dict(message)
        for key in ("content", "reasoning_content", "name"):
            if isinstance(turn.get(key), str):
                turn[key] = change(turn[key], role=role)
        if turn.get("tool_calls"):
            turn["tool_calls"] = _mapped(turn["tool_calls"], partial(change, role=role))
        messages.append(turn)
    tools = [_mapped(dict(tool), partial(change, role="system")) for tool in conversation.tools or ()]
    return Conversation(tuple(messages), tuple(tools) or None, conversation.unread)  # type: ignore[arg-type]


def _mapped(value: Json, change: Callable[[str], str]) -> Json:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(inner, change) for key, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, list) else value
