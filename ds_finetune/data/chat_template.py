"""A chat template: what it renders, and of which fields of a message it takes notice."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ds_finetune.data.messages import Conversation, parse_json
from ds_finetune.errors import DataError

Messages = Sequence[Mapping[str, Any]]
_MARK = "\ue0f1{name}\ue0f2"
"""No template writes these private-use characters, and rows with them are refused (`messages.RESERVED_CHARACTERS`)."""


def placeholder(name: object) -> str:
    """A text that nothing else holds, which stands for another while a template is rendered."""
    return _MARK.format(name=name)


_ASKED = {"role": "user", "content": "x"}
_IDS = (placeholder("assistant.id"), "abcdefghi")
_PARAMETERS = {"type": "object", "properties": {}}
_TOOL = {"type": "function", "function": {"name": placeholder("tool"), "description": "d", "parameters": _PARAMETERS}}


class RenderingError(Exception):
    """The template fails on these messages."""


class ChatTemplate:
    """A template with the special tokens of a tokenizer, and what probes say of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.source = source
        self._special_tokens = tokenizer.special_tokens_map
        self._ends = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.probes = _probes(self)

    def render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, *, opens: bool = False) -> str:
        """Text of the messages, with the header of an answer behind them if `opens`; RenderingError where the template
        fails.
        """
        from jinja2 import TemplateError

        try:
            # Not `apply_chat_template`: transformers 5.23 drops keys whose value is None
            # (tokenization_utils_base.py:3144),
            # and R1's own template tells a tool call by `message['content'] is none`.
            (rendered,), _ = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) if tools else None,
                chat_template=self.source,
                add_generation_prompt=opens,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as broken:
            raise RenderingError(str(broken) or type(broken).__name__) from broken
        return str(rendered)

    def turn_end(self, text: str) -> str:
        """The first special token of `text`."""
        places = [(text.find(token), token) for token in self._ends if token in text]
        return min(places)[1] if places else ""


@dataclass(frozen=True)
class Probes:
    """What a template does with tools, calls and reasoning; `turn_end` is the special token that ends an answer."""

    turn_end: str
    object_arguments: bool
    calls: bool
    no_content: str | None
    """What a message that only calls tools has as content."""
    tools: bool
    reasoning: str
    """`field`: `reasoning_content` is rendered; `tags`: the template knows `</think>` in contents; empty: neither."""
    fields: frozenset[str]
    """Fields of messages beside role, content, calls and reasoning that are rendered: `user.name`, `tool.name`, ..."""


def _probes(template: ChatTemplate) -> Probes:
    answer = _tried(template, [_ASKED, {"role": "assistant", "content": placeholder(0)}])
    thought = _tried(
        template, [_ASKED, {"role": "assistant", "content": "x", "reasoning_content": placeholder("thought")}]
    )
    named = _tried(template, [{**_ASKED, "name": placeholder("user.name")}])
    calls, object_arguments, no_content = _call_probes(template)
    known = ("user.name", "tool.name", "tool.tool_call_id", "assistant.id")
    return Probes(
        turn_end=template.turn_end(answer.partition(placeholder(0))[2]),
        object_arguments=object_arguments,
        calls=bool(calls),
        no_content=no_content,
        tools=placeholder("tool") in _tried(template, [_ASKED], with_tool=True),
        reasoning="field" if placeholder("thought") in thought else "tags" if "</think>" in template.source else "",
        fields=frozenset(name for name in known if placeholder(name) in calls + named),
    )


def _call_probes(template: ChatTemplate) -> tuple[str, bool, str | None]:
    """A rendering of a tool call, whether its arguments were an object, and its content where it has no text.

    Some templates write a content of None as `None`, and Mistral's fail on an id that has not nine letters.
    """
    objects: dict[str, int] = {placeholder("key"): 1}
    for no_content, arguments, call_id in product((None, ""), (objects, json.dumps(objects, ensure_ascii=False)), _IDS):
        call = {"type": "function", "id": call_id, "function": {"name": placeholder("call"), "arguments": arguments}}
        result = {
            "role": "tool",
            "content": "x",
            "name": placeholder("tool.name"),
            "tool_call_id": placeholder("tool.tool_call_id"),
        }
        result["tool_call_id"] = call_id if call_id == _IDS[1] else result["tool_call_id"]
        rendered = _tried(
            template, [_ASKED, {"role": "assistant", "content": no_content, "tool_calls": [call]}, result]
        )
        if placeholder("call") in rendered and placeholder("key") in rendered and "None" not in rendered:
            return rendered, arguments is objects, no_content
    return "", False, None


def _tried(template: ChatTemplate, messages: Messages, *, with_tool: bool = False) -> str:
    """What the template renders, with a tool where it fails without one; nothing where it fails with one too."""
    try:
        return template.render(messages, [_TOOL] if with_tool else None)
    except RenderingError:
        return "" if with_tool else _tried(template, messages, with_tool=True)


def adapt_messages(conversation: Conversation, template: ChatTemplate, reasoning: str) -> list[dict[str, Any]]:
    """Messages as the template wants them: arguments as objects or texts, reasoning as a field or in tags.

    `reasoning` is `keep` or `strip`, as in the run file.
    """
    return [_rendered_message(message, template.probes, reasoning) for message in conversation.messages]


def _rendered_message(message: Mapping[str, Any], probes: Probes, reasoning: str) -> dict[str, Any]:
    turn = {key: value for key, value in message.items() if key != "weight"}
    if reasoning == "strip":
        turn.pop("reasoning_content", None)
        if turn["role"] == "assistant" and isinstance(turn["content"], str):
            turn["content"] = strip_reasoning(turn["content"])
    if "reasoning_content" in turn and probes.reasoning == "tags":
        thought = turn.pop("reasoning_content")
        turn["content"] = f"<think>\n{thought}\n</think>\n\n{turn['content'] or ''}"
    if turn.get("tool_calls"):
        turn["content"] = turn["content"] or probes.no_content
        turn["tool_calls"] = [_rendered_call(call, probes) for call in turn["tool_calls"]]
    return turn


def strip_reasoning(content: str) -> str:
    """A content from behind its last `</think>`."""
    return content.rpartition("</think>")[2].lstrip("\n") if "</think>" in content else content


def _rendered_call(call: Mapping[str, Any], probes: Probes) -> dict[str, Any]:
    function = call["function"]
    if not probes.object_arguments:
        return dict(call)
    return {**call, "function": {**function, "arguments": parse_json(function["arguments"])}}


def template_error(where: str, broken: RenderingError) -> DataError:
    """The error for a row on which the template fails."""
    return DataError(
        f"{where}: the chat template refuses the row: {broken}", hint="mend the row, or give another data.template"
    )
