"""The turns of a conversation under a chat template: what is supervised follows from how the template is rendered,
never from searching it.

The texts of a turn (content, reasoning, names of called functions) are replaced by marks that cannot occur
otherwise and the conversation is rendered; what stands before the marks is prompt, what follows them ends the turn.
The true texts are then put in verbatim, so a template that cuts reasoning out of past turns (R1's
`content.split('</think>')`) or trims them does not touch what is supervised. A text whose mark is missing from the
rendering is lost, and so is the row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_finetune.data.chat_template import ChatTemplate, RenderingError, placeholder, template_error
from ds_finetune.data.control_tokens import find_token
from ds_finetune.data.messages import parse_json
from ds_finetune.errors import DataError

_THINK_END = "</think>"


@dataclass(frozen=True)
class Turn:
    """An assistant turn: its prompt, what is supervised, and how the turn ends.

    `number` is that of its message; `is_open` if it is a tool call that the template leaves without the end of other
    turns.
    """

    number: int
    prompt: str
    body: str
    ending: str
    is_open: bool = False


class UnrenderedTextError(Exception):
    """A text of the row is not in the rendering; the argument is its name in `reasons.DROPPED`."""


class RenderedConversation:
    """One conversation under one template; `messages` are as the template wants them."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        where: str,
    ) -> None:
        self._template, self._tools, self._where = template, tools, where
        self._messages = messages
        self._refuse_losses()
        self._marked = [
            _marked(message, number) if message["role"] == "assistant" else message
            for number, message in enumerate(messages)
        ]

    def turns(self) -> list[Turn]:
        """The assistant turns in order, each with everything between it and the end of the one before as its prompt.

        UnrenderedTextError where the template leaves out a text; DataError where it fails, or changes an earlier turn.
        """
        found: list[Turn] = []
        done = ""
        for number, message in enumerate(self._messages):
            if message["role"] == "assistant":
                turn, done = self._turn(number, done)
                found.append(turn)
        return found or [Turn(len(self._messages), self._render(self._messages), "", "")]

    def check(self, turns: Sequence[Turn], *, is_protected: bool) -> None:
        """UnrenderedTextError where a text of the row is missing in `turns`, or the template reorders texts.

        `is_protected` if control tokens are marked as text: a template that writes JSON in ASCII would escape the
        marks.
        """
        document = "".join(turn.prompt + turn.body + turn.ending for turn in turns)
        end = turns[-1].number + 1
        messages = self._messages[:end]
        if any(message["role"] != "assistant" and message["content"].strip() not in document for message in messages):
            raise UnrenderedTextError("text")
        if is_protected and any(escaped in document for escaped in ("\\ue0f3", "\\uE0F3")):
            raise UnrenderedTextError("text")
        try:
            whole = self._template.render(
                [_marked(message, number) for number, message in enumerate(messages)], self._tools
            )
        except RenderingError:
            return
        # Reasoning of past turns may be gone; that of each turn was in its own rendering.
        texts = [
            [stands for stands, _, kind in _marks(message, n) if kind != "reasoning"]
            for n, message in enumerate(messages)
        ]
        places = [min(map(whole.find, stands)) for stands in texts]
        if -1 in places or places != sorted(places):
            raise UnrenderedTextError("text")

    def server_prompt(self, number: int) -> str | None:
        """What `apply_chat_template` gives a server for the messages before `number`; None where it fails."""
        try:
            # It drops keys whose value is None: transformers 5.23, tokenization_utils_base.py:3144.
            given = [
                {key: value for key, value in message.items() if value is not None}
                for message in self._messages[:number]
            ]
            return self._template.render(given, self._tools, opens=True) if given else None
        except RenderingError:
            return None

    def tools_note(self, document: str) -> str:
        """What is to be noted of the tools: nothing, `tools` where they are not rendered, `tools_partly` where some
        text is not.
        """
        if not self._tools:
            return ""
        if not self._template.probes.tools:
            return "tools"
        return "" if all(_holds(document, text) for tool in self._tools for text in _leaves(tool)) else "tools_partly"

    def _refuse_losses(self) -> None:
        probes = self._template.probes
        if not probes.calls and any(message.get("tool_calls") for message in self._messages):
            raise UnrenderedTextError("calls")
        if probes.reasoning != "field" and any(message.get("reasoning_content") for message in self._messages):
            raise UnrenderedTextError("reasoning")

    def _render(self, messages: Sequence[Mapping[str, Any]], *, opens: bool = False) -> str:
        try:
            return self._template.render(messages, self._tools, opens=opens)
        except RenderingError as broken:
            raise template_error(self._where, broken) from broken

    def _after(self, done: str, rendered: str) -> str:
        """What a rendering holds behind the turns already taken."""
        _, found, rest = rendered.partition(done) if done else ("", "", rendered)
        if found == done:
            return rest
        raise DataError(
            f"{self._where}: the chat template changes an earlier turn when a later one is added: {done!r:.80} is gone",
            hint="give a data.template that only appends",
        )

    def _turn(self, number: int, done: str) -> tuple[Turn, str]:
        message = self._messages[number]
        closed = self._after(done, self._render(self._marked[: number + 1]))
        places = sorted((closed.find(stands), stands, kind) for stands, _, kind in _marks(message, number))
        (first, _, first_kind), (last, last_mark, last_kind) = places[0], places[-1]
        if first < 0:
            raise UnrenderedTextError(first_kind)
        middle, tail = closed[first:last], closed[last + len(last_mark) :]
        end, is_open = self._call_end(middle, tail) if last_kind == "calls" else (0, False)
        texts = {stands: text for stands, text, _ in _marks(message, number)}
        rest = _verbatim(middle + last_mark + tail[:end], texts)
        prompt, body = self._split(number, done, closed[:first], rest)
        if not all(_has_arguments(call, body) for call in message.get("tool_calls") or ()):
            raise UnrenderedTextError("calls")
        return Turn(number, prompt, body, tail[end:], is_open), last_mark + tail

    def _call_end(self, middle: str, tail: str) -> tuple[int, bool]:
        """Where in `tail` the end of a turn that calls tools begins, and whether it has none."""
        token = self._template.probes.turn_end
        ends = find_token(token, tail)
        if len(ends) > 1 or find_token(token, middle):
            # R1's template ends the turn behind each call but the first.
            raise UnrenderedTextError("calls")
        return (ends[0], False) if ends else (len(tail.rstrip("\n")), True)

    def _split(self, number: int, done: str, header: str, rest: str) -> tuple[str, str]:
        """The prompt of a turn and its body: `header` is rendered before the texts of the turn, `rest` holds them.

        The prompt is what a server would send, where the turn begins with it, and the header alone elsewhere.
        """
        message = self._messages[number]
        opened = self._after(done, self._render(self._marked[:number], opens=True)) if number else None
        is_call = not message["content"] and not message.get("reasoning_content") and message.get("tool_calls")
        written = header[len(opened) :] if opened is not None and header.startswith(opened) else ""
        if opened is not None and _THINK_END in written and _THINK_END in (message["content"] or ""):
            # The template writes an empty reasoning before an answer without one; this answer brings its own.
            header = opened
        whole = header + rest
        for prompt in (opened, *(self._call_prompts(number, done) if is_call else [header])):
            if prompt is not None and whole.startswith(prompt):
                return prompt, whole[len(prompt) :]
        raise UnrenderedTextError("calls")

    def _call_prompts(self, number: int, done: str) -> Iterator[str]:
        """What may stand before a tool call: the header of an answer in text, or the messages before without a
        header.
        """
        answer = {"role": "assistant", "content": placeholder(number)}
        yield self._after(done, self._render([*self._marked[:number], answer])).partition(placeholder(number))[0]
        if number:
            yield self._after(done, self._render(self._marked[:number]))


def _marks(message: Mapping[str, Any], number: int) -> list[tuple[str, str, str]]:
    """Marks for the texts of a message, what they stand for, and under which reason they are lost."""
    thought = (
        [(placeholder(f"{number}r"), message["reasoning_content"], "reasoning")]
        if message.get("reasoning_content")
        else []
    )
    calls = [
        (placeholder(f"{number}c{place}"), call["function"]["name"], "calls")
        for place, call in enumerate(message.get("tool_calls") or ())
    ]
    return [
        *([(placeholder(number), message["content"], "text")] if message["content"] or not calls else []),
        *thought,
        *calls,
    ]


def _marked(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    turn = dict(message)
    if turn["content"] or not turn.get("tool_calls"):
        turn["content"] = placeholder(number)
    if turn.get("reasoning_content"):
        turn["reasoning_content"] = placeholder(f"{number}r")
    if turn.get("tool_calls"):
        calls = enumerate(turn["tool_calls"])
        turn["tool_calls"] = [
            {**call, "function": {**call["function"], "name": placeholder(f"{number}c{place}")}}
            for place, call in calls
        ]
    return turn


def _verbatim(text: str, texts: Mapping[str, str]) -> str:
    for stands, given in texts.items():
        text = text.replace(stands, given)
    return text


def _has_arguments(call: Mapping[str, Any], text: str) -> bool:
    """Whether the arguments of a call are in `text`: as JSON, or each of their texts and numbers."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        if arguments in text:
            return True
        arguments = parse_json(arguments)
    return json.dumps(arguments, ensure_ascii=False) in text or all(_holds(text, leaf) for leaf in _leaves(arguments))


def _leaves(value: object) -> Iterator[str]:
    """Keys, texts and numbers of a JSON value, as texts."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (str(key), *_leaves(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None:
        yield value if isinstance(value, str) else json.dumps(value)


def _holds(text: str, leaf: str) -> bool:
    """Whether `text` holds `leaf` as it is or as JSON writes it."""
    return any(form in text for form in (leaf, json.dumps(leaf, ensure_ascii=False)[1:-1], json.dumps(leaf)[1:-1]))
