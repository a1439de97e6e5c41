"""Renders dialogues with a chat template, and finds out by probe messages which message fields the template renders.

A template may come with a model of unknown origin, so the time and memory of rendering are limited.
"""

import json
import resource
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ds_finetune.config.units import GIB
from ds_finetune.data.messages import Conversation, parse_json
from ds_finetune.errors import ConfigError, DataError

RENDER_SECONDS, _RENDER_BYTES = 10.0, GIB
"""Rendering one dialogue with a chat template may take this many seconds of CPU time and bytes of memory."""
_STATM = Path("/proc/self/statm")


class _TimeIsUpError(BaseException):
    """Rendering took too long. jinja2 3.1.6 ignores an Exception in constants (nodes.py:511), but no BaseException."""


class TemplateLimits:
    """Context manager that limits the time and memory of rendering a template; ConfigError beyond the limits.

    Time is limited only in the main thread, where Python handles signals, and memory only where there is a /proc. No
    signal interrupts a single operation on huge integers, so templates with `**` are refused.
    """

    def __init__(self, source: str) -> None:
        if _has_power(source):
            raise _refusal("uses `**`, which can compute without an end")
        self._address_space = resource.getrlimit(resource.RLIMIT_AS)
        self._has_handler = _is_main_thread()
        if self._has_handler:
            signal.signal(signal.SIGVTALRM, _raise_time_is_up)

    def __enter__(self) -> None:
        soft, hard = self._address_space
        if most := _address_space_limit(int(time.monotonic())):
            resource.setrlimit(resource.RLIMIT_AS, (most if soft < 0 else min(soft, most), hard))
        if self._has_handler and _is_main_thread():
            signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._has_handler and _is_main_thread():
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, self._address_space)
        if kind is _TimeIsUpError:
            raise _refusal(f"computes for more than {RENDER_SECONDS:g} s on one dialogue") from None
        if kind is MemoryError:
            raise _refusal(f"takes more than {_RENDER_BYTES // GIB} GiB of memory on one dialogue") from None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@lru_cache(maxsize=1)
def _address_space_limit(_: int) -> int | None:
    """Limit of the process's address space in bytes. The argument, the current second, is the key of the cache."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[0]) * resource.getpagesize() + _RENDER_BYTES


def _raise_time_is_up(*_: object) -> None:
    raise _TimeIsUpError


@lru_cache(maxsize=16)
def _has_power(source: str) -> bool:
    try:
        return any(kind == "operator" and text == "**" for _, kind, text in Environment(autoescape=True).lex(source))
    except TemplateError:
        # A syntax error in a chat template is reported later, when the template is rendered.
        return False


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"the chat template cannot be used: it {reason}", hint="give another one as data.template")


Messages = Sequence[Mapping[str, Any]]
_PLACEHOLDER = "\ue0f1{name}\ue0f2"
"""Placeholder of a text, in private-use characters that no template writes; data rows that have them are refused."""
_KEPT_RENDERINGS, _SHOWN_CHARACTERS = 64, 80


def placeholder(name: object) -> str:
    """Make a unique text that replaces a text of a data row while its dialogue is rendered."""
    return _PLACEHOLDER.format(name=name)


_QUESTION = {"role": "user", "content": "x"}
_ANSWER = "a \"b\" 'c' <d> & \\ é\nE"
_IDS = (placeholder("assistant.id"), "abcdefghi")
_PARAMETERS = {"type": "object", "properties": {}}
_TOOL = {"type": "function", "function": {"name": placeholder("tool"), "description": "d", "parameters": _PARAMETERS}}


class RenderingError(Exception):
    """The chat template raises an error for the given messages."""


_FAULTS = (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)


class ChatTemplate:
    """A chat template with the special tokens of a tokenizer. `probes` records which fields of a message it renders."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.source, self._limits = source, TemplateLimits(source)
        self._special_tokens = tokenizer.special_tokens_map
        self._recent: OrderedDict[str, str] = OrderedDict()
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._ends = [*dict.fromkeys([*special, *tokenizer.all_special_tokens])]
        self._reasoning_key = "reasoning_content"
        self.probes = _probes(self)
        if self.probes.reasoning == "thinking":
            self._reasoning_key = "thinking"

    def render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, *, opens: bool = False) -> str:
        """Render messages to text; with `opens`, add the header of an answer. RenderingError if the template fails."""
        # Renderings are cached, since many are repeated: the prompt of a preference pair is rendered four times, and
        # with placeholders for texts many dialogues are equal. The key is a repr, in which 1 and True differ.
        key = repr((messages, tools, opens))
        if key in self._recent:
            self._recent.move_to_end(key)
        else:
            self._recent[key] = self._render(messages, tools, opens=opens)
            if len(self._recent) > _KEPT_RENDERINGS:
                self._recent.popitem(last=False)
        return self._recent[key]

    def _render(self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, *, opens: bool) -> str:
        try:
            # `apply_chat_template` is not used because transformers 5.23 drops keys whose value is None
            # (tokenization_utils_base.py:3144), while R1's template recognises a tool call by `message['content'] is
            # none`.
            with self._limits:
                (rendered,), _ = render_jinja_template(
                    conversations=[[self._named(message) for message in messages]],
                    tools=list(tools) if tools else None,
                    chat_template=self.source,
                    add_generation_prompt=opens,
                    **self._special_tokens,
                )
        except TemplateSyntaxError as broken:
            line = self.source.splitlines()[broken.lineno - 1 : broken.lineno]
            raise ConfigError(
                f"the chat template is not valid Jinja: line {broken.lineno}: {broken.message}: "
                f"{''.join(line).strip()[:_SHOWN_CHARACTERS]!r}",
                hint="correct data.template, or without it the chat_template of the tokenizer",
            ) from None
        except _FAULTS as broken:
            raise RenderingError(str(broken) or type(broken).__name__) from broken
        return str(rendered)

    def _named(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        return {self._reasoning_key if key == "reasoning_content" else key: value for key, value in message.items()}

    def turn_end(self, text: str) -> str:
        """First special token of `text`, which ends a turn; empty if there is none."""
        positions = [(text.find(token), token) for token in self._ends if token in text]
        return min(positions)[1] if positions else ""


@dataclass(frozen=True)
class Probes:
    """Which tools, tool calls and reasoning a chat template renders, found by rendering probe messages."""

    turn_end: str
    """Special token with which the chat template ends an answer."""
    object_arguments: bool
    """Whether the chat template expects the arguments of a tool call as an object, not as JSON text."""
    calls: bool
    no_content: str | None
    """Content that the chat template expects in a message that has only tool calls: None or an empty text."""
    tools: bool
    reasoning: str
    """Where the template reads reasoning: `reasoning_content`, `thinking`, `tags` (`</think>` in texts) or nowhere."""
    is_named_by_id: bool
    """Whether the chat template writes the id of a tool call, as Kimi K2's does, instead of the function's name."""
    changed: str
    """How the chat template renders a probe answer, if it changes the answer's text, e.g. by escapes; else empty."""
    fields: frozenset[str]
    """Names of optional message fields that the chat template renders, such as `user.name` or `tool.name`."""
    as_answers: frozenset[tuple[str, bool]]
    """Non-assistant messages that the chat template writes as answers: (role, whether it is the first message)."""


def _probes(template: ChatTemplate) -> Probes:
    answer = _try_render(template, [_QUESTION, {"role": "assistant", "content": placeholder(0)}])
    thought = placeholder("thought")
    thinking = {key: {"role": "assistant", "content": "x", key: thought} for key in ("reasoning_content", "thinking")}
    thoughts = (key for key, each in thinking.items() if thought in _try_render(template, [_QUESTION, each]))
    named = _try_render(template, [{**_QUESTION, "name": placeholder("user.name")}])
    calls, object_arguments, no_content = _call_probes(template)
    written = _try_render(template, [_QUESTION, {"role": "assistant", "content": _ANSWER}])
    fields = ("user.name", "tool.name", "tool.tool_call_id", "assistant.id")
    return Probes(
        turn_end=template.turn_end(answer.partition(placeholder(0))[2]),
        object_arguments=object_arguments,
        calls=bool(calls),
        no_content=no_content,
        tools=placeholder("tool") in _try_render(template, [_QUESTION], with_tool=True),
        reasoning=next(thoughts, "tags" if "</think>" in template.source else ""),
        is_named_by_id=bool(calls) and placeholder("call") not in calls,
        changed="" if not answer or _ANSWER in written else written,
        fields=frozenset(name for name in fields if placeholder(name) in calls + named),
        as_answers=frozenset(
            (role, is_first)
            for role in ("system", "developer", "tool")
            for is_first in (True, False)
            if _is_as_answer(template, role, is_first=is_first)
        ),
    )


def _is_as_answer(template: ChatTemplate, role: str, *, is_first: bool) -> bool:
    messages = [_QUESTION, {"role": role, "content": placeholder(0)}, _QUESTION][is_first:]
    rendered = _try_render(template, messages)
    answers = [message if message is _QUESTION else {**message, "role": "assistant"} for message in messages]
    return placeholder(0) in rendered and rendered == _try_render(template, answers)


def _call_probes(template: ChatTemplate) -> tuple[str, bool, str | None]:
    """Find the form of tool call that the chat template renders completely, by trying several forms of a probe message.

    Returns the rendering (empty if no form works), whether arguments are given as an object, and the content that is
    expected beside a call. Some templates write a content of None as `None`, and Mistral's fail on an id that does not
    have nine characters.
    """
    objects: dict[str, int] = {placeholder("key"): 1}
    for no_content, arguments, call_id in product((None, ""), (objects, json.dumps(objects, ensure_ascii=False)), _IDS):
        call = {"type": "function", "id": call_id, "function": {"name": placeholder("call"), "arguments": arguments}}
        result_id = call_id if call_id == _IDS[1] else placeholder("tool.tool_call_id")
        result = {"role": "tool", "content": "x", "name": placeholder("tool.name"), "tool_call_id": result_id}
        answer = {"role": "assistant", "content": no_content, "tool_calls": [call]}
        rendered = _try_render(template, [_QUESTION, answer, result])
        is_named = placeholder("call") in rendered or call_id in rendered
        if is_named and placeholder("key") in rendered and "None" not in rendered:
            return rendered, arguments is objects, no_content
    return "", False, None


def _try_render(template: ChatTemplate, messages: Messages, *, with_tool: bool = False) -> str:
    """Render messages, first without and then with a tool, which some templates need; empty if both fail."""
    try:
        return template.render(messages, [_TOOL] if with_tool else None)
    except RenderingError:
        return "" if with_tool else _try_render(template, messages, with_tool=True)


def adapt(conversation: Conversation, template: ChatTemplate, reasoning: str) -> Conversation:
    """The conversation in the template's form: arguments as objects or JSON text, reasoning as a field or in tags."""
    messages = tuple(_adapt_message(message, template.probes, reasoning) for message in conversation.messages)
    return replace(conversation, messages=messages)


def _adapt_message(message: Mapping[str, Any], probes: Probes, reasoning: str) -> dict[str, Any]:
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
        if probes.object_arguments:
            turn["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": parse_json(call["function"]["arguments"])}}
                for call in turn["tool_calls"]
            ]
    return turn


def strip_reasoning(content: str) -> str:
    """Part of a message's content after the last `</think>`; the full content if there is none."""
    return content.rpartition("</think>")[2].lstrip("\n") if "</think>" in content else content


def template_error(where: str, broken: RenderingError) -> DataError:
    """Make the DataError for a training row whose messages the chat template refuses."""
    return DataError(
        f"{where}: the chat template refuses the row: {broken}", hint="correct the row, or give another data.template"
    )
