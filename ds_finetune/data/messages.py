"""Converts the messages of a data row to OpenAI's form: contents as text, with OpenAI's roles and tool calls.

DataError names a message that cannot be read.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from ds_finetune.errors import DataError

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]
RESERVED_CHARACTERS = "\ue0f1\ue0f2\ue0f3\ue0f4"
"""Private-use characters that mark texts in a rendered template; data rows that contain one are refused."""
_ROLE_NAMES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "call",
    "tool_call": "call",
}
"""OpenAI's role for each role name of OpenAI or ShareGPT. The content of a `call` message is a tool call in JSON."""
ANSWER_ROLES = tuple(name for name, role in _ROLE_NAMES.items() if role in ("assistant", "call"))
"""Role names of assistant messages in OpenAI's and ShareGPT's forms."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_VALUE_PARTS = ("reasoning", "text", "tool_call")
"""Types of parts in LLaMA-Factory's assistant messages, in the order in which chat templates write the parts."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TRAINED_IF = {
    **dict.fromkeys(("weight", "loss", "loss_scale", "loss_weight", "train", "training"), 1),
    **dict.fromkeys(("mask", "masked"), 0),
}
"""Message fields that say whether an assistant message is trained, with the value that means yes. They are from OpenAI
(weight), ms-swift (loss, loss_scale), LLaMA-Factory (loss_weight), axolotl (train, training), torchtune (masked) and
others.
"""
_MESSAGE_KEYS = {
    "role",
    "from",
    "content",
    "value",
    "tool_calls",
    "function_call",
    "name",
    "tool_call_id",
    "train_detail",
}


@dataclass(frozen=True)
class Conversation:
    """Messages and tools in OpenAI's form: contents are text, `arguments` are JSON text, tools have a `type`.

    `unread` names fields of the messages that are not used.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    unread: tuple[str, ...] = ()

    def with_system(self, text: str, where: str) -> Self:
        """Prepend a system message if there is none; DataError where the messages begin with a different one."""
        first = self.messages[0]
        if first["role"] != "system":
            return replace(self, messages=({"role": "system", "content": text}, *self.messages))
        if first["content"] == text:
            return self
        raise DataError(
            f"{where}: column `system` is {text!r:.60}, and the first turn is the system text {first['content']!r:.60}",
            hint="give the system text once",
        )


def read_conversation(messages: object, tools: object, column: str, where: str) -> Conversation:
    """Read the messages in `column` into OpenAI's form; DataError names a message that cannot be read or trained.

    Consecutive assistant messages are joined to one turn, in the order in which models write: text, then calls.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(
            f"{where}: `{column}` is {shown_value(messages)}, no list of messages",
            hint=f"give a list of {{role, content}}{no_lists_in_csv(messages)}",
        )
    turns: list[dict[str, Any]] = []
    unread: dict[str, None] = {}
    for number, message in enumerate(messages, start=1):
        location = f"{where}: message {number} of `{column}`"
        turn, unknown = _message(message, location, where)
        if turns and turn["role"] == turns[-1]["role"] == "assistant":
            turns[-1] = _joined(turns[-1], turn, location)
        else:
            turns.append(turn)
        unread |= dict.fromkeys(f"{column}[].{name}" for name in unknown)
    return Conversation(tuple(turns), read_tools(tools, where), tuple(unread))


def read_tools(tools: object, where: str) -> tuple[Mapping[str, Any], ...] | None:
    """Tools of a data row, from a list or its JSON text; None if the row has none.

    Each tool is wrapped as `{type: function, function: ...}`, the form in which servers pass tools to templates.
    """
    parsed = _parse_row_json(tools, f"{where}: `tools`") if isinstance(tools, str) and tools.strip() else tools
    if not parsed:
        return None
    if not isinstance(parsed, list | tuple):
        raise DataError(
            f"{where}: `tools` is {shown_value(parsed)}, no list", hint="give a list of tools, or that list as JSON"
        )
    check_text(_json(parsed, f"{where}: `tools`"), f"{where}: `tools`")
    return tuple(_tool(tool, f"{where}: tool {number}") for number, tool in enumerate(parsed, start=1))


def check_text(value: object, name: str) -> str:
    """Check that `value` is a text that a tokenizer accepts, and return it; else raise a DataError about `name`."""
    if not isinstance(value, str):
        raise DataError(f"{name} is {shown_value(value)}, not text", hint="correct the row, or name another column")
    try:
        value.encode()
    except UnicodeEncodeError as lone:
        raise DataError(
            f"{name} contains the lone surrogate U+{ord(value[lone.start]):04X}, half of a character",
            hint="correct the row: the text was cut inside a UTF-16 pair",
        ) from None
    reserved = "" if value.isascii() else next((char for char in RESERVED_CHARACTERS if char in value), "")
    if reserved:
        raise DataError(
            f"{name} contains the private-use character U+{ord(reserved):04X}",
            hint="remove the character, which is reserved for rendering chat templates",
        )
    return value


def without_nulls(value: object) -> object:
    """Remove nulls from the objects of a JSON value; Arrow adds them where rows have different keys."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def no_lists_in_csv(value: object) -> str:
    """Addition to a hint where the text `value` holds a JSON list, as in a CSV file; empty for other values."""
    is_list = isinstance(value, str) and value.lstrip().startswith("[")
    return "; the text is a JSON list: write the list itself, in JSONL or Parquet, since CSV has no lists" * is_list


def shown_value(value: object) -> str:
    """Type and beginning of a value, as shown in error messages."""
    return "null" if value is None else f"{type(value).__name__} {value!r:.60}"


def _tool(tool: object, location: str) -> Mapping[str, Any]:
    inner = tool.get("function", tool) if isinstance(tool, dict) else tool
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise DataError(
            f"{location} is {shown_value(tool)}, which has no function with a name",
            hint="give {type: function, function: {name, ...}}",
        )
    assert isinstance(tool, dict)
    return tool if inner is not tool and "type" in tool else {"type": "function", "function": inner}


def _message(message: object, location: str, where: str) -> tuple[dict[str, Any], list[str]]:
    if not isinstance(message, dict):
        raise DataError(f"{location} is {shown_value(message)}, not an object", hint="give a list of {role, content}")
    fields = {key: value for key, value in message.items() if value is not None}
    name = fields.get("role", fields.get("from"))
    role = _ROLE_NAMES.get(name) if isinstance(name, str) else None
    if role is None:
        raise DataError(
            f"{where}: unknown role {name!r} in {location.removeprefix(f'{where}: ')}",
            hint=f"roles are {', '.join(_ROLE_NAMES)}",
        )
    content = fields.get("content", fields.get("value"))
    has_fields = any(fields.get(key) for key in ("tool_calls", *_REASONING))
    if role == "assistant" and isinstance(content, list | tuple) and not has_fields:
        fields |= (read := _value_parts(content, location))
        content = read.get("content", content)
    if role in ("assistant", "call"):
        return _assistant(fields, content, is_call=role == "call", location=location)
    for key in ("tool_calls", "function_call"):
        if fields.get(key):
            raise DataError(
                f"{location}: a {role} message has `{key}` {fields[key]!r:.60}",
                hint="only assistant messages call tools",
            )
    turn = {"role": role, "content": _text(content, location)}
    turn |= {key: check_text(fields[key], f"{location}: `{key}`") for key in ("name", "tool_call_id") if key in fields}
    for key in ("train", "training", "train_detail"):
        if fields.get(key):
            raise DataError(
                f"{location}: a {role} message has `{key}` {fields[key]!r:.60}; only assistant messages are trained",
                hint="remove the field, or set data.train_on: all, which trains every token of the dialogue",
            )
    return turn, [key for key in fields if key not in _MESSAGE_KEYS and fields[key] != 1 - _TRAINED_IF.get(key, -1)]


def _assistant(
    fields: Mapping[str, Any], content: object, *, is_call: bool, location: str
) -> tuple[dict[str, Any], list[str]]:
    calls = _calls(content, location) if is_call else []
    for key in ("tool_calls", "function_call"):
        calls += _calls(fields[key], location) if fields.get(key) else []
    reasoning = next((fields[key] for key in _REASONING if fields.get(key)), None)
    if (content is None or is_call) and not calls:
        raise DataError(
            f"{location}: an assistant message has neither content nor tool calls: {dict(fields)!r:.60}",
            hint="correct or remove the row",
        )
    text = None if is_call or content is None else _text(content, location)
    # R1's template expects the content None beside tool calls; OpenAI's API may give an empty text instead.
    turn: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if calls:
        turn["tool_calls"] = calls
    if reasoning is not None:
        turn["reasoning_content"] = check_text(reasoning, f"{location}: the reasoning")
        if text and "</think>" in text:
            raise DataError(
                f"{location} has a reasoning field, and `</think>` in its content: {text!r:.60}",
                hint="give the reasoning in one of the two only",
            )
    if not _is_trained(fields, location):
        turn["weight"] = 0
    unread = [key for key in fields if key not in _MESSAGE_KEYS and key not in _REASONING and key not in _TRAINED_IF]
    return turn, [*unread, *(["name"] if "name" in fields else [])]


def _joined(first: Mapping[str, Any], second: Mapping[str, Any], location: str) -> dict[str, Any]:
    first_keys = [key for key in ("reasoning_content", "content", "tool_calls") if first.get(key)]
    parts = [key for key in ("reasoning_content", "content", "tool_calls") if second.get(key)]
    if "tool_calls" in first_keys and parts != ["tool_calls"]:
        problem = "no result follows the tool calls before it"
    elif "reasoning_content" in parts and first_keys:
        problem = "it begins with new reasoning"
    elif first.get("weight", 1) != second.get("weight", 1):
        problem = "only one of the two is trained"
    else:
        text = "\n".join(turn["content"] for turn in (first, second) if turn["content"])
        calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
        turn = {**first, **second, "content": text or (None if calls else "")}
        return {**turn, "tool_calls": calls} if calls else turn
    raise DataError(
        f"{location} continues an assistant message, but {problem}",
        hint="join the two messages, or add the one missing between them",
    )


def _is_trained(fields: Mapping[str, Any], location: str) -> bool:
    flags = {key: fields[key] for key in _TRAINED_IF if key in fields}
    flag_values = ", ".join(f"{key} {value!r:.60}" for key, value in flags.items())
    if any(not isinstance(value, int | float) or value not in (0, 1) for value in flags.values()):
        raise DataError(
            f"{location} has {flag_values}", hint="an assistant message is trained (weight 1) or not (weight 0)"
        )
    if fields.get("train_detail"):
        raise DataError(
            f"{location} has `train_detail` {fields['train_detail']!r:.60}; a message is trained whole or not at all",
            hint="remove the field, or divide the message",
        )
    verdicts = {value == _TRAINED_IF[key] for key, value in flags.items()}
    if len(verdicts) > 1:
        raise DataError(f"{location} has {flag_values}, which contradict each other", hint="keep one of these fields")
    return verdicts != {False}


def _text(content: object, location: str) -> str:
    """Content of a message as one text. Parts are joined by newlines, as in vLLM; LLaMA-Factory's are concatenated."""
    if not isinstance(content, list | tuple):
        return check_text(content, f"{location}: the content")
    have_values = all(isinstance(part, dict) and "value" in part for part in content)
    return ("" if have_values else "\n").join(_part(part, location) for part in content)


def _value_parts(parts: Sequence[Any], location: str) -> dict[str, Any]:
    """Convert a LLaMA-Factory message, whose parts have a `value`, to OpenAI's fields; empty for other messages."""
    kinds: list[Any] = [part.get("type") for part in parts if isinstance(part, dict) and "value" in part]
    if len(kinds) < len(parts) or not all(kind in _VALUE_PARTS for kind in kinds):
        return {}
    if kinds != sorted(kinds, key=_VALUE_PARTS.index):
        raise DataError(
            f"{location} has the parts {', '.join(kinds)}, which no chat template writes in this order",
            hint=f"give them in the order {', '.join(_VALUE_PARTS)}, or divide the message",
        )
    texts = {
        kind: [check_text(part["value"], f"{location}: a {kind} part") for part in parts if part["type"] == kind]
        for kind in _VALUE_PARTS
    }
    calls = [call for text in texts["tool_call"] for call in _calls(text, location)]
    return {"content": "".join(texts["text"]), "reasoning_content": "".join(texts["reasoning"]), "tool_calls": calls}


def _part(part: object, location: str) -> str:
    if isinstance(part, str):
        return check_text(part, f"{location}: a part")
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise DataError(
            f"{location} has a part of type {kind!r}: {part!r:.60}",
            hint="only text is trained, and parts of an assistant that have a `value`; remove rows with media",
        )
    return check_text(part.get("text", part.get("value")), f"{location}: a text part")


def _calls(value: object, location: str) -> list[dict[str, Any]]:
    parsed = _parse_row_json(value, f"{location}: the tool call") if isinstance(value, str) else value
    calls = parsed if isinstance(parsed, list | tuple) else [parsed]
    return [_call(call, location) for call in calls]


def _call(call: object, location: str) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    kind = (call.get("type") or "function") if isinstance(call, dict) else type(call).__name__
    if kind != "function" or not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise DataError(
            f"{location} has the tool call {shown_value(call)}, which has no function with a name",
            hint="give {name, arguments}",
        )
    assert isinstance(call, dict)
    function = {"name": check_text(inner["name"], location), "arguments": _arguments(inner, location)}
    turn = {"type": "function", "function": function}
    return turn | ({"id": check_text(call["id"], f"{location}: `id`")} if call.get("id") is not None else {})


def _arguments(inner: Mapping[str, Any], location: str) -> str:
    """Arguments of a tool call as the JSON text of an object. Arguments that are already text stay unchanged."""
    value = inner.get("arguments", inner.get("parameters"))
    name = f"{location}: `arguments` of {inner['name']}"
    text = value if isinstance(value, str) else _json({} if value is None else value, name)
    parsed = _parse_row_json(check_text(text, name), name) if text.strip() else {}
    if not isinstance(parsed, dict):
        raise DataError(f"{name} is {shown_value(value)}, not an object", hint="give arguments by name")
    check_text(_json(parsed, name), name)
    return text if text.strip() else "{}"


def parse_json(text: str) -> Json:
    """Parse JSON; ValueError for repeated keys, NaN and numbers out of range, which are no valid JSON values."""
    return json.loads(text, object_pairs_hook=unique_keys, parse_float=_finite, parse_constant=_finite)


def _parse_row_json(text: str, name: str) -> Json:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as broken:
        raise DataError(f"{name} is not JSON: {broken}: {text!r:.60}", hint="correct or remove the row") from None


def _json(value: object, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as broken:
        raise DataError(
            f"{name} cannot be written as JSON: {broken}: {value!r:.60}", hint="correct or remove the row"
        ) from None


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dictionary of a JSON object; ValueError where a key is repeated (`json` would keep the last value)."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.60} is repeated in one object")
    return unique


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no finite number")
    return value


def map_texts(conversation: Conversation, change: Callable[[str, str], str]) -> Conversation:
    """Replace each text of a conversation by the result of `change(role, text)`; tools have the role `system`."""
    messages = []
    for message in conversation.messages:
        role = message["role"]
        turn = dict(message)
        for key in ("content", "reasoning_content", "name"):
            if isinstance(turn.get(key), str):
                turn[key] = change(role, turn[key])
        if turn.get("tool_calls"):
            turn["tool_calls"] = _map_json(turn["tool_calls"], partial(change, role))
        messages.append(turn)
    tools = [_map_json(dict(tool), partial(change, "system")) for tool in conversation.tools or ()]
    return Conversation(tuple(messages), tuple(tools) or None, conversation.unread)  # type: ignore[arg-type]


def _map_json(value: Json, change: Callable[[str], str]) -> Json:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_json(inner, change) for key, inner in value.items()}
    return [_map_json(inner, change) for inner in value] if isinstance(value, list) else value
