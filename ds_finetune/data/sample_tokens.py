"""Exact tokens and loss masks of a sample; the turns of a conversation are taken apart in `turns`.

Prompt and completion are tokenised apart, as a server does, so the prompt's ids are those the model will see.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from ds_finetune.data.chat_template import ChatTemplate, adapt_messages, strip_reasoning
from ds_finetune.data.control_tokens import ControlTokens, strip_brackets
from ds_finetune.data.layouts import Completion, PlainText, Sample
from ds_finetune.data.messages import Conversation
from ds_finetune.data.rendering import RenderedConversation, Turn, UnrenderedTextError
from ds_finetune.errors import DataError

RULES_VERSION = 2
"""Raised when the same row becomes other tokens, so that cached tokens of other rules are not taken for them."""


@dataclass(frozen=True)
class Segment:
    """A stretch of text tokenised on its own; `supervised` is `none`, `all`, or `turn_end` (through its first special
    token).
    """

    text: str
    supervised: str


@dataclass(frozen=True)
class Tokens:
    """Token ids of a document and which of them carry loss.

    `server_prompt_differs` where a prompt is not what a server would send. `dropped` is the reason for which the row
    is left out and `notes` are its remarks, both by their names in `row_report`; `unread` are fields that nothing
    reads.
    """

    ids: list[int]
    mask: list[bool]
    server_prompt_differs: bool = False
    dropped: str = ""
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class TemplateSettings:
    """What of the data section decides about tokens; `chat_template` is None where dialogue is plain text."""

    chat_template: str | None
    train_on: str
    reasoning: str
    control_tokens: str = "text"
    separator: str = "\n"


@dataclass(frozen=True)
class _SampleText:
    """Segments of a sample before they are tokenised, and what Tokens says of it.

    `server_prompt` is what a server would send before the last trained answer, which segment `lead` begins.
    """

    segments: tuple[Segment, ...]
    result: Tokens
    server_prompt: str = ""
    lead: int = 0


class SampleTokeniser:
    """Turns samples into tokens with one tokenizer and one template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: TemplateSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._template = None if settings.chat_template is None else ChatTemplate(tokenizer, settings.chat_template)
        self._control = ControlTokens(tokenizer, settings.chat_template, settings.control_tokens)
        self._special = set(tokenizer.all_special_ids) | {
            i for i, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        adds_bos = tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]
        self._bos = [tokenizer.bos_token_id] if adds_bos and tokenizer.bos_token_id is not None else []

    def tokenise(self, samples: Sequence[tuple[str, Sample]]) -> list[Tokens]:
        """Tokens of each sample; the first of each pair says where it stands, for messages. One tokenizer call
        for all.
        """
        plans = [self._plan(sample, where) for where, sample in samples]
        encoded = iter(
            self._control.ids(
                [text for plan in plans for text in (*(s.text for s in plan.segments), plan.server_prompt)]
            )
        )
        found = []
        for (where, sample), plan in zip(samples, plans, strict=True):
            parts = [(segment, next(encoded)) for segment in plan.segments]
            server = next(encoded)
            is_chat = not isinstance(sample, PlainText) and self._template is not None
            tokens = self._assemble(parts, is_chat=is_chat, where=where)
            lead = [i for _, ids in parts[: plan.lead] for i in ids]
            differs = plan.result.server_prompt_differs or (bool(plan.server_prompt) and lead != server)
            found.append(replace(plan.result, ids=tokens.ids, mask=tokens.mask, server_prompt_differs=differs))
        return found

    def _plan(self, sample: Sample, where: str) -> _SampleText:
        if self._template is not None and not isinstance(sample, PlainText):
            return self._chat_plan(
                sample.conversation if isinstance(sample, Completion) else sample, self._template, where
            )
        if isinstance(sample, Conversation):
            raise DataError(
                f"{where} is a conversation and the tokenizer has no chat template",
                hint="set data.template to a Jinja file",
            )
        texts = [sample.text] if isinstance(sample, PlainText) else [sample.prompt, sample.completion]
        held = any(self._control.has_control_token(text) for text in texts)
        if held and self._settings.control_tokens == "refuse":
            raise DataError(
                f"{where}: a text holds a control token of the tokenizer: {texts[0]!r:.60}",
                hint="set data.control_tokens to keep",
            )
        if isinstance(sample, Completion) and sample.conversation.messages[:-2]:
            return _SampleText((), Tokens([], [], dropped="plain"))
        has_tools = isinstance(sample, Completion) and sample.conversation.tools
        notes = tuple(name for name, holds in (("control_plain", held), ("tools", has_tools)) if holds)
        segments = [Segment(sample.text, "all")] if isinstance(sample, PlainText) else self._completion_segments(sample)
        return _SampleText(tuple(segments), Tokens([], [], notes=notes))

    def _completion_segments(self, sample: Completion) -> list[Segment]:
        completion = strip_reasoning(sample.completion) if self._settings.reasoning == "strip" else sample.completion
        prompt = sample.prompt
        if not (prompt[-1:].isspace() or completion[:1].isspace()):
            prompt += self._settings.separator
        supervised = "all" if self._settings.train_on == "all" else "none"
        return [
            Segment(prompt, supervised),
            Segment(completion, "all"),
            Segment(str(self._tokenizer.eos_token), "turn_end"),
        ]

    def _chat_plan(self, given: Conversation, template: ChatTemplate, where: str) -> _SampleText:
        conversation, control = self._control.protect(given, where)
        messages = adapt_messages(conversation, template, self._settings.reasoning)
        unread = (*given.unread, *_unread_fields(conversation, template))
        try:
            rendered = RenderedConversation(template, messages, conversation.tools, where)
            turns = rendered.turns()
            rendered.check(turns, is_protected=bool(control))
        except UnrenderedTextError as lost:
            return _SampleText((), Tokens([], [], dropped=str(lost), unread=unread))
        last = turns[-1].number
        notes = [
            control,
            rendered.tools_note("".join(turn.prompt for turn in turns)),
            "open_call" if any(t.is_open for t in turns) else "",
        ]
        notes += ["behind"] if last < len(messages) - 1 else []
        plan = self._segments(turns, self._trained(conversation, turns), rendered)
        return replace(plan, result=replace(plan.result, notes=tuple(note for note in notes if note), unread=unread))

    def _trained(self, conversation: Conversation, turns: Sequence[Turn]) -> set[int]:
        """Numbers of the messages that carry loss."""
        chosen = turns[-1:] if self._settings.train_on == "last_assistant" else turns
        answers = [turn.number for turn in chosen if turn.number < len(conversation.messages)]
        return {number for number in answers if conversation.messages[number].get("weight", 1) != 0}

    def _segments(self, turns: Sequence[Turn], trained: set[int], rendered: RenderedConversation) -> _SampleText:
        before = "all" if self._settings.train_on == "all" else "none"
        segments: list[Segment] = []
        text, server, lead, differs = "", "", 0, False
        for turn in turns:
            is_trained = turn.number in trained
            text += turn.prompt
            segments.append(Segment(turn.prompt, before))
            if is_trained:
                prompt = rendered.server_prompt(turn.number)
                server, lead, differs = (
                    prompt or "",
                    len(segments),
                    differs or prompt is None or strip_brackets(prompt) != strip_brackets(text),
                )
            segments += [Segment(turn.body, "all" if is_trained else "none"), _ending(turn, is_trained=is_trained)]
            text += turn.body + turn.ending
        # A prompt with no answer before it is tokenised as a server does; others are compared id by id.
        compared = server if not differs and lead > 1 else ""
        return _SampleText(tuple(segments), Tokens([], [], server_prompt_differs=differs), compared, lead)

    def _assemble(self, parts: Iterable[tuple[Segment, list[int]]], *, is_chat: bool, where: str) -> Tokens:
        ids = [] if is_chat else list(self._bos)
        mask = [False] * len(ids)
        last = "none"
        for segment, found in parts:
            ids += found
            mask += self._supervised_mask(segment, found, where)
            last = segment.supervised
        if last == "all" and not is_chat:
            ids, mask = [*ids, int(self._tokenizer.eos_token_id)], [*mask, True]
        bos = self._tokenizer.bos_token_id
        again = (
            ids.index(bos, 1) if bos is not None and bos in ids[1:] and bos != self._tokenizer.eos_token_id else None
        )
        if again is not None:
            raise DataError(
                f"{where}: a second {self._tokenizer.bos_token} stands at token {again}",
                hint="the row's text holds it, or the chat template writes it twice",
            )
        return Tokens(ids, mask)

    def _supervised_mask(self, segment: Segment, ids: list[int], where: str) -> list[bool]:
        if segment.supervised != "turn_end":
            return [segment.supervised == "all"] * len(ids)
        end = next((place for place, token in enumerate(ids) if token in self._special), None)
        if segment.text and end is None:
            raise DataError(
                f"{where}: the chat template ends an assistant turn with {segment.text!r}, which holds no special "
                "token",
                hint="a model trained so would never stop; give a template that ends turns with the eos token",
            )
        return [end is not None and place <= end for place in range(len(ids))]


def _ending(turn: Turn, *, is_trained: bool) -> Segment:
    return Segment(turn.ending, "turn_end" if is_trained and not turn.is_open else "none")


def _unread_fields(conversation: Conversation, template: ChatTemplate) -> list[str]:
    """Fields that the template does not render; what carries no text of its own is passed to it all the same."""
    held = {
        f"{message['role']}.{key}"
        for message in conversation.messages
        for key in ("name", "tool_call_id")
        if key in message
    }
    held |= {
        "assistant.id" for message in conversation.messages for call in message.get("tool_calls") or () if "id" in call
    }
    return sorted(f"{name} (not in the chat template)" for name in held - template.probes.fields)
