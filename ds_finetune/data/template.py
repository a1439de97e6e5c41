"""Exact tokens and loss masks of a sample: what is supervised follows from how the template is rendered, never from searching it.

A turn's content is replaced by a marker that cannot occur otherwise and the conversation is rendered; what stands before
the marker is prompt, what follows it ends the turn. The true content is then put in verbatim, so a template that cuts
reasoning out of past turns (R1's `content.split('</think>')`) or trims them does not touch what is learnt. Prompt and
completion are tokenised apart, as a server does, so the prompt's ids are those the model will see.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ds_finetune.data.layouts import Completion, Conversation, PlainText, Sample
from ds_finetune.errors import DataError

_MARK = "\ue0f1{number}\ue0f2"
"""Private-use characters: no text and no template has them."""
_THINK_END = "</think>"


@dataclass(frozen=True)
class Segment:
    """A stretch of text tokenised on its own; `learnt` is `none`, `all`, or `turn_end` (through its first special token)."""

    text: str
    learnt: str


@dataclass(frozen=True)
class Tokens:
    """Token ids of a document and which of them carry loss; `lead_differs` if the prompt is not what a server would send."""

    ids: list[int]
    mask: list[bool]
    lead_differs: bool = False


@dataclass(frozen=True)
class _Turn:
    """One trained turn: its prompt, what is learnt, and how the turn ends."""

    prompt: str
    body: str
    ending: str
    lead_differs: bool = False


@dataclass(frozen=True)
class TemplateSettings:
    """What of the data section decides about tokens; `chat_template` is None where dialogue is plain text."""

    chat_template: str | None
    train_on: str
    reasoning: str


class Templater:
    """Turns samples into tokens with one tokenizer and one template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: TemplateSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._special = set(tokenizer.all_special_ids) | {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        adds_bos = tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]
        self._bos = [tokenizer.bos_token_id] if adds_bos and tokenizer.bos_token_id is not None else []

    def tokens(self, samples: Sequence[tuple[str, Sample]]) -> list[Tokens]:
        """Tokens of each sample; the first of each pair says where it stands, for messages. One tokenizer call for all."""
        plans = [self._segments(sample, where) for where, sample in samples]
        texts = [segment.text for segments, _ in plans for segment in segments]
        encoded = iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        found = []
        for (where, sample), (segments, differs) in zip(samples, plans, strict=True):
            is_chat = isinstance(sample, Conversation | Completion) and self._settings.chat_template is not None
            tokens = self._assemble([(segment, next(encoded)) for segment in segments], is_chat=is_chat, where=where)
            found.append(replace(tokens, lead_differs=differs))
        return found

    def _segments(self, sample: Sample, where: str) -> tuple[list[Segment], bool]:
        if isinstance(sample, PlainText):
            return [Segment(sample.text, "all")], False
        if self._settings.chat_template is None:
            return self._plain_segments(sample, where), False
        conversation = sample.conversation if isinstance(sample, Completion) else sample
        turns = self._turns(conversation, where)
        trained = {"assistant": range(len(turns)), "last_assistant": range(len(turns) - 1, len(turns)), "all": range(len(turns))}[
            self._settings.train_on
        ]
        segments: list[Segment] = []
        for number, turn in enumerate(turns):
            learnt = number in trained
            before = "all" if self._settings.train_on == "all" else "none"
            segments += [
                Segment(turn.prompt, before),
                Segment(turn.body, "all" if learnt else "none"),
                Segment(turn.ending, "turn_end" if learnt else "none"),
            ]
        return segments, any(turn.lead_differs for turn in turns)

    def _plain_segments(self, sample: Conversation | Completion, where: str) -> list[Segment]:
        if isinstance(sample, Conversation):
            raise DataError(f"{where} is a conversation and the tokenizer has no chat template", hint="set data.template to a Jinja file")
        prompt = "all" if self._settings.train_on == "all" else "none"
        return [Segment(sample.prompt, prompt), Segment(self._kept(sample.completion), "all"), Segment(str(self._tokenizer.eos_token), "turn_end")]

    def _turns(self, conversation: Conversation, where: str) -> list[_Turn]:
        """The assistant turns in order, each with everything between it and the end of the one before as its prompt."""
        messages = [dict(message) for message in conversation.messages]
        marked = [self._marked(message, number) for number, message in enumerate(messages)]
        turns: list[_Turn] = []
        done: tuple[str, str] | None = None
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            render = _Renderer(self._tokenizer, self._settings.chat_template, conversation.tools, where)
            opened = _after(done, render(marked[:number], opens=True), where)
            if message.get("content"):
                turn, done = self._content_turn(message, number, opened, _after(done, render(marked[: number + 1]), where))
            else:
                whole = render(marked[: number + 1])
                before = render(marked[:number], opens=False)
                if not whole.startswith(before):
                    raise DataError(f"{where}: the chat template changes what stands before turn {number}", hint="give a template that only appends")
                turn, done = _Turn(_after(done, before, where), whole[len(before) :], ""), ("prefix", whole)
            turns.append(turn)
        if not turns:
            return [_Turn(_Renderer(self._tokenizer, self._settings.chat_template, conversation.tools, where)(marked), "", "")]
        return turns

    def _marked(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        if message["role"] != "assistant" or not message.get("content"):
            return message
        return {**message, "content": _MARK.format(number=number)}

    def _content_turn(self, message: Mapping[str, Any], number: int, opened: str, closed: str) -> tuple[_Turn, tuple[str, str]]:
        """A turn whose header is what the generation prompt `opened` and the finished turn `closed` agree on."""
        mark = _MARK.format(number=number)
        header, _, ending = closed.partition(mark)
        content = self._kept(str(message["content"]))
        done = ("mark", mark + ending)
        if _THINK_END in content and _THINK_END in header.removeprefix(opened):
            # The template writes an empty reasoning before an answer without one; this answer brings its own.
            header = opened
        if header.startswith(opened):
            return _Turn(opened, header[len(opened) :] + content, ending), done
        extra = opened[len(header) :] if opened.startswith(header) else None
        if extra is not None and content.startswith(extra):
            return _Turn(opened, content[len(extra) :], ending), done
        return _Turn(header, content, ending, lead_differs=True), done

    def _kept(self, content: str) -> str:
        return content.rpartition(_THINK_END)[2].lstrip("\n") if self._settings.reasoning == "strip" else content

    def _assemble(self, parts: Iterable[tuple[Segment, list[int]]], *, is_chat: bool, where: str) -> Tokens:
        ids = [] if is_chat else list(self._bos)
        mask = [False] * len(ids)
        last = "none"
        for segment, found in parts:
            ids += found
            mask += self._learnt(segment, found, where)
            last = segment.learnt
        if last == "all" and not is_chat:
            ids, mask = [*ids, int(self._tokenizer.eos_token_id)], [*mask, True]
        bos = self._tokenizer.bos_token_id
        again = ids.index(bos, 1) if bos is not None and bos in ids[1:] and bos != self._tokenizer.eos_token_id else None
        if again is not None:
            raise DataError(
                f"{where}: a second {self._tokenizer.bos_token} stands at token {again}",
                hint="the row's text holds it, or the chat template writes it twice",
            )
        return Tokens(ids, mask)

    def _learnt(self, segment: Segment, ids: list[int], where: str) -> list[bool]:
        if segment.learnt != "turn_end":
            return [segment.learnt == "all"] * len(ids)
        end = next((place for place, token in enumerate(ids) if token in self._special), None)
        if segment.text and end is None:
            raise DataError(
                f"{where}: the chat template ends an assistant turn with {segment.text!r}, which holds no special token",
                hint="a model trained so would never stop; give a template that ends turns with the eos token",
            )
        return [end is not None and place <= end for place in range(len(ids))]


class _Renderer:
    """Renders messages with a chat template to text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None, tools: Sequence[Mapping[str, Any]] | None, where: str) -> None:
        self._tokenizer, self._template, self._tools, self._where = tokenizer, template, tools, where

    def __call__(self, messages: Sequence[Mapping[str, Any]], *, opens: bool = False) -> str:
        from jinja2 import TemplateError

        if not messages:
            return ""
        try:
            # Not `apply_chat_template`: transformers 5.23 drops keys whose value is None (tokenization_utils_base.py:3144),
            # and R1's own template tells a tool call by `message['content'] is none`.
            (rendered,), _ = render_jinja_template(
                conversations=[list(messages)],
                tools=list(self._tools) if self._tools else None,
                chat_template=self._template,
                add_generation_prompt=opens,
                **self._tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError) as broken:
            raise DataError(
                f"{self._where}: the chat template refuses the row: {broken}", hint="mend the row, or give another data.template"
            ) from broken
        return str(rendered)


def _after(done: tuple[str, str] | None, rendered: str, where: str) -> str:
    """What a rendering holds behind the turns already taken."""
    if done is None:
        return rendered
    kind, text = done
    if kind == "prefix" and rendered.startswith(text):
        return rendered[len(text) :]
    _, found, rest = rendered.partition(text)
    if kind == "mark" and found:
        return rest
    raise DataError(
        f"{where}: the chat template changes an earlier turn when a later one is added",
        hint="give a template that only appends, or set data.train_on last_assistant",
    )
