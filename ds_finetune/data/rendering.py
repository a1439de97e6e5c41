"""Renders a conversation with a chat template and finds the assistant turns in the result.

The texts of a turn (content, reasoning, names of called functions) are replaced by unique placeholders, and the
conversation is rendered. The text before the placeholders is the prompt; the text after them ends the turn. The
placeholders are then replaced by the texts of the row. So a template that removes reasoning from past turns (R1's
`content.split('</think>')`) or strips white space does not change which tokens are supervised. If a placeholder is
missing in the rendering, the row is dropped.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import escape

from ds_finetune.data.chat_template import ChatTemplate, RenderingError, placeholder, template_error
from ds_finetune.data.messages import RESERVED_CHARACTERS, Conversation, parse_json
from ds_finetune.data.text_encoder import find_token
from ds_finetune.errors import DataError

_THINK_END = "</think>"


@dataclass(frozen=True)
class Turn:
    """An assistant turn in a rendered dialogue: its prompt, its supervised body, and the text that ends the turn.

    `number` is the index of the turn's message. `is_open` is true for a tool call after which the template does not
    write the token that ends other turns.
    """

    number: int
    prompt: str
    body: str
    ending: str
    is_open: bool = False


class UnrenderedTextError(Exception):
    """The chat template does not render a text of the data row; the argument is a reason in `row_report.DROPPED`."""


class RewrittenTurnError(Exception):
    """The chat template renders an earlier turn differently when a later turn is added."""


class RenderedConversation:
    """A conversation rendered with a chat template, in the form that `chat_template.adapt` gives it.

    With `only`, the assistant message of this index is the only turn, and answers before it belong to its prompt. With
    `is_protected`, control tokens are in brackets (`ControlTokens.protect`).
    UnrenderedTextError if the template does not render tool calls or reasoning of the conversation.
    """

    def __init__(
        self,
        template: ChatTemplate,
        conversation: Conversation,
        where: str,
        *,
        is_protected: bool = False,
        only: int | None = None,
    ) -> None:
        self._template, self._where, self._only, self._is_protected = template, where, only, is_protected
        self._conversation, self._tools = conversation, conversation.tools
        self._messages = list(conversation.messages)[: None if only is None else only + 1]
        probes = template.probes
        if not probes.calls and any(message.get("tool_calls") for message in self._messages):
            raise UnrenderedTextError("calls")
        if probes.reasoning in ("", "tags") and any(message.get("reasoning_content") for message in self._messages):
            raise UnrenderedTextError("reasoning")
        self._with_placeholders = [
            _with_placeholders(message, number, template) if self._is_turn(number) else message
            for number, message in enumerate(self._messages)
        ]

    def prefixes(self, numbers: Sequence[int]) -> "list[RenderedConversation]":
        """For each assistant message in `numbers`, the conversation up to this message as its only turn."""
        given = self._template, self._conversation, self._where
        return [RenderedConversation(*given, is_protected=self._is_protected, only=number) for number in numbers]

    def _is_turn(self, number: int) -> bool:
        return self._messages[number]["role"] == "assistant" and self._only in (None, number)

    def turns(self) -> list[Turn]:
        """Assistant turns of the conversation in order. The prompt of a turn is all text after the previous turn.

        A conversation without an assistant message is one turn that has only a prompt.

        UnrenderedTextError where the template leaves out a text; DataError where it fails; RewrittenTurnError where it
        renders an earlier turn differently.
        """
        turns: list[Turn] = []
        done = ""
        for number in range(len(self._messages)):
            if not self._is_turn(number):
                continue
            try:
                turn, done = self._turn(number, done)
            except RewrittenTurnError:
                # Phi-3's template writes an end-of-text token after the last turn, and none before a further turn.
                turns[-1], done = self._without_last_text(turns[-1], done)
                turn, done = self._turn(number, done)
            turns.append(turn)
        return turns or [Turn(len(self._messages), self._render(self._messages), "", "")]

    def _without_last_text(self, turn: Turn, done: str) -> tuple[Turn, str]:
        token = self._template.turn_end(turn.ending)
        ending = turn.ending.partition(token)[0] + token if token else turn.ending
        if ending == turn.ending:
            raise RewrittenTurnError
        return replace(turn, ending=ending), done[: len(done) - len(turn.ending) + len(ending)]

    def turn_end(self, turn: Turn) -> str:
        """Text that ends a turn, up to and including its first special token; DataError where it has none."""
        token = self._template.turn_end(turn.ending)
        if not token:
            raise DataError(
                f"{self._where}: the chat template ends an assistant turn with {turn.ending!r}, which has no special "
                "token",
                hint="a model trained on it would never stop; give a template that ends turns with the eos token",
            )
        return turn.ending.partition(token)[0] + token

    def check(self, turns: Sequence[Turn]) -> None:
        """Raise UnrenderedTextError if the rendered `turns` lack a text of the row, if the template reorders texts, or
        if it writes ASCII JSON, which escapes the brackets of control tokens.
        """
        document = "".join(turn.prompt + turn.body + turn.ending for turn in turns)
        end = turns[-1].number + 1
        messages = self._messages[:end]
        others = [message["content"].strip() for message in messages if message["role"] != "assistant"]
        if not all(_contains(document, content) for content in others):
            raise UnrenderedTextError("text")
        if self._is_protected and any(escaped in document for escaped in ("\\ue0f3", "\\uE0F3")):
            raise UnrenderedTextError("text")
        try:
            marked = [_with_placeholders(message, n, self._template) for n, message in enumerate(messages)]
            rendered = self._template.render(marked, self._tools)
        except RenderingError:
            return
        # Reasoning is not checked: a template may remove it from past turns, and `turns()` checked each turn.
        names = [
            [name for name, _, kind in _placeholders(message, n, self._template) if kind != "reasoning"]
            for n, message in enumerate(messages)
            if message["role"] != "assistant" or self._is_turn(n)
        ]
        positions = [min(_find(rendered, name) for name in of_message) for of_message in names]
        if -1 in positions or positions != sorted(positions):
            raise UnrenderedTextError("text")

    def server_prompt(self, number: int) -> str | None:
        """A server's prompt (`apply_chat_template`) for the messages before `number`; None where rendering fails."""
        try:
            # Message keys whose value is None are dropped, as transformers 5.23 does (tokenization_utils_base.py:3144).
            messages = [
                {key: value for key, value in message.items() if value is not None}
                for message in self._messages[:number]
            ]
            return self._template.render(messages, self._tools, opens=True) if messages else None
        except RenderingError:
            return None

    def open_prompt(self) -> str:
        """A server's prompt for all messages, with the answer's header, checked by `check`; DataError where the
        template fails.
        """
        prompt = self.server_prompt(len(self._messages))
        prompt = self._render(self._messages, opens=True) if prompt is None else prompt
        self.check([Turn(len(self._messages), prompt, "", "")])
        return prompt

    def role_note(self) -> str:
        """Remark (a key of `row_report.NOTED`) if the template writes another role as an answer; else empty."""
        roles = {(message["role"], number == 0) for number, message in enumerate(self._messages)}
        return "as_answer" if roles & self._template.probes.as_answers else ""

    def tools_note(self, document: str) -> str:
        """Remark (a key of `row_report.NOTED`) if the template leaves out tools or parts of them; else empty."""
        if not self._tools:
            return ""
        if not self._template.probes.tools:
            return "tools"
        is_complete = all(_contains(document, text) for tool in self._tools for text in _leaves(tool))
        return "" if is_complete else "tools_partly"

    def _render(self, messages: Sequence[Mapping[str, Any]], *, opens: bool = False) -> str:
        try:
            return self._template.render(messages, self._tools, opens=opens)
        except RenderingError as broken:
            raise template_error(self._where, broken) from broken

    def _after(self, done: str, rendered: str) -> str:
        _, separator, rest = rendered.partition(done) if done else ("", "", rendered)
        if separator == done:
            return rest
        raise RewrittenTurnError

    def _turn(self, number: int, done: str) -> tuple[Turn, str]:
        message = self._messages[number]
        closed = self._after(done, self._render(self._with_placeholders[: number + 1]))
        placeholders = _placeholders(message, number, self._template)
        positions = sorted((closed.find(name), name, kind) for name, _, kind in placeholders)
        (first, _, first_kind), (last, last_name, last_kind) = positions[0], positions[-1]
        if first < 0:
            raise UnrenderedTextError(first_kind)
        middle, tail = closed[first:last], closed[last + len(last_name) :]
        end, is_open = self._call_end(middle, tail) if last_kind == "calls" else (0, False)
        texts = {name: text for name, text, _ in placeholders}
        rest = _fill_in(middle + last_name + tail[:end], texts)
        prompt, body = self._split(number, done, closed[:first], rest)
        if not all(_has_call(call, body) for call in message.get("tool_calls") or ()):
            raise UnrenderedTextError("calls")
        stop = "" if self._template.probes.turn_end else self._next_header(number, last_name + tail)
        turn = Turn(number, self._with_texts(prompt), body, tail[end:] + stop, is_open and not stop)
        return turn, last_name + tail + stop

    def _with_texts(self, prompt: str) -> str:
        """Fill in the texts of earlier turns that a prompt repeats, as gpt-oss's template repeats a call's name."""
        texts = {
            name: text
            for number, message in enumerate(self._messages)
            if RESERVED_CHARACTERS[0] in prompt and self._is_turn(number)
            for name, text, _ in _placeholders(message, number, self._template)
        }
        return _fill_in(prompt, texts)

    def _next_header(self, number: int, done: str) -> str:
        """Text that the template writes after a turn, up to the first special token of the next turn; empty if there is
        none. Models such as GLM-4.5 stop at this token. After the last message of a conversation, the template gets one
        more to find the text: a tool's result after tool calls, else a user's turn.
        """
        is_call = bool(self._messages[number].get("tool_calls"))
        after = self._messages[number + 1 : number + 2] or [{"role": "tool" if is_call else "user", "content": "x"}]
        try:
            rendered = self._template.render([*self._with_placeholders[: number + 1], *after], self._tools)
        except RenderingError:
            return ""
        header = rendered.partition(done)[2]
        token = self._template.turn_end(header)
        return header.partition(token)[0] + token if token else ""

    def _call_end(self, middle: str, tail: str) -> tuple[int, bool]:
        """Index of a turn's end in `tail`, the text after its tool calls, and whether the end token is missing."""
        token = self._template.probes.turn_end
        ends = find_token(token, tail)
        if len(ends) > 1 or find_token(token, middle):
            # Turns with several end tokens are refused: R1's template writes one after each tool call but the first.
            raise UnrenderedTextError("calls")
        return (ends[0], False) if ends else (len(tail.rstrip("\n")), True)

    def _split(self, number: int, done: str, header: str, rest: str) -> tuple[str, str]:
        """Split the rendered turn `number` into prompt and body. `done` is the dialogue before the turn. The turn is
        `header` + `rest`; `header` ends where the text of its message begins.

        The prompt is what a server would send to get this turn, if the turn begins with it, else `header`.
        """
        message = self._messages[number]
        opened = self._after(done, self._render(self._with_placeholders[:number], opens=True)) if number else None
        is_call = not message["content"] and not message.get("reasoning_content") and message.get("tool_calls")
        written = header[len(opened) :] if opened is not None and header.startswith(opened) else ""
        if opened is not None and _THINK_END in written and _THINK_END in (message["content"] or ""):
            # If an answer has its reasoning in the content instead of a field, the template writes an empty reasoning
            # block in the header. The header without reasoning is used instead.
            header = opened
        text = header + rest
        for prompt in (opened, *(self._call_prompts(number, done) if is_call else [header])):
            if prompt is not None and text.startswith(prompt):
                return prompt, text[len(prompt) :]
        raise UnrenderedTextError("calls")

    def _call_prompts(self, number: int, done: str) -> Iterator[str]:
        """Yield what may be the prompt of a tool call: first with the header that opens a text answer, then without."""
        answer = {"role": "assistant", "content": placeholder(number)}
        rendered = self._after(done, self._render([*self._with_placeholders[:number], answer]))
        yield rendered.partition(placeholder(number))[0]
        if number:
            yield self._after(done, self._render(self._with_placeholders[:number]))


def _placeholders(message: Mapping[str, Any], number: int, template: ChatTemplate) -> list[tuple[str, str, str]]:
    """For each text of a message: its placeholder, the text, and the reason to drop the row if it is not rendered."""
    texts: list[tuple[str, str, str]] = []
    calls = message.get("tool_calls") or ()
    if message["content"] or not calls:
        texts.append((placeholder(number), message["content"], "text"))
    if message.get("reasoning_content"):
        texts.append((placeholder(f"{number}r"), message["reasoning_content"], "reasoning"))
    for index, call in enumerate(calls):
        # Kimi K2's template writes the id of a tool call, which contains the function's name, instead of the name.
        name = call.get("id", "") if template.probes.is_named_by_id else call["function"]["name"]
        texts.append((placeholder(f"{number}c{index}"), str(name), "calls"))
    return texts


def _with_placeholders(message: Mapping[str, Any], number: int, template: ChatTemplate) -> Mapping[str, Any]:
    turn = dict(message)
    if turn["content"] or not turn.get("tool_calls"):
        turn["content"] = placeholder(number)
    if turn.get("reasoning_content"):
        turn["reasoning_content"] = placeholder(f"{number}r")
    if turn.get("tool_calls"):
        calls = enumerate(turn["tool_calls"])
        turn["tool_calls"] = [
            {**call, "id": placeholder(f"{number}c{index}")}
            if template.probes.is_named_by_id
            else {**call, "function": {**call["function"], "name": placeholder(f"{number}c{index}")}}
            for index, call in calls
        ]
    return turn


def _fill_in(text: str, texts: Mapping[str, str]) -> str:
    for name, of_row in texts.items():
        text = text.replace(name, of_row)
    return text


def _has_call(call: Mapping[str, Any], text: str) -> bool:
    if call["function"]["name"] not in text:
        return False
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        if arguments in text:
            return True
        arguments = parse_json(arguments)
    as_json = json.dumps(arguments, ensure_ascii=False)
    return as_json in text or all(_contains(text, leaf) for leaf in _leaves(arguments))


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (str(key), *_leaves(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None:
        yield value if isinstance(value, str) else json.dumps(value)


def _contains(text: str, leaf: str) -> bool:
    return _find(text, leaf) >= 0


def _find(text: str, leaf: str) -> int:
    """Index in `text` of a value from a tool call, verbatim or escaped for JSON or HTML; -1 if it is missing."""
    index = text.find(leaf)
    if index >= 0:
        return index
    forms = (json.dumps(leaf, ensure_ascii=False)[1:-1], json.dumps(leaf)[1:-1], str(escape(leaf)))
    return max(map(text.find, forms))
