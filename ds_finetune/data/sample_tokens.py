"""Tokenises the samples of data rows, and marks which tokens are supervised.

A prompt gets the same token ids as on an inference server, which tokenises only the prompt. An answer gets the ids
that it has in the full text. If the tokenizer would merge characters of prompt and answer in one token,
the answer is tokenised separately.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ds_finetune.config.objectives import BosRule
from ds_finetune.data.chat_template import ChatTemplate, adapt, strip_reasoning
from ds_finetune.data.messages import Conversation
from ds_finetune.data.prompts import Prompt
from ds_finetune.data.record_layouts import Completion, PlainText, Sample
from ds_finetune.data.rendering import RenderedConversation, RewrittenTurnError, Turn, UnrenderedTextError
from ds_finetune.data.text_encoder import ControlTokens, strip_brackets
from ds_finetune.errors import DataError

RULES_VERSION = 8
"""Version of the tokenisation rules, raised when rows get other tokens or remarks, to ignore older caches."""


@dataclass(frozen=True)
class Segment:
    """A part of a document's text, which is supervised or not. No token has characters of two segments."""

    text: str
    is_supervised: bool
    is_answer: bool = False


@dataclass(frozen=True)
class Tokens:
    """Token ids of a document, and the mask of supervised tokens.

    `server_prompt_differs` is true if a prompt differs from the one that a server would make. `dropped` is the reason
    to drop the data row and `notes` are remarks on it, both by their names in `row_report`. `unread` names message
    fields that are not used.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    segments: tuple[Segment, ...] = ()
    """Text segments of a document that is not yet tokenised; empty as soon as it has `ids` and `mask`."""
    server_prompt_differs: bool = False
    dropped: str = ""
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    form: str = ""
    """Form of a completion's prompt without a chat template: `alpaca`, `separator`, or `joined` if the completion
    begins with white space; empty for other data rows.
    """
    earlier: "tuple[Tokens, ...]" = ()


@dataclass(frozen=True)
class TemplateSettings:
    """Keys of the run file's data section that affect tokens.

    `chat_template` is None if dialogue is tokenised as plain text. `tool_template` renders rows with tools; it is empty
    if `chat_template` renders them too.
    """

    chat_template: str | None
    train_on: str
    reasoning: str
    control_tokens: str = "text"
    separator: str = "\n"
    tool_template: str = ""


class SampleTokeniser:
    """Tokenises the samples of data rows with one tokenizer and one chat template.

    Without a template, a sample begins with a BOS token if `bos` says so, and ends with an EOS token if `has_eos`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: TemplateSettings,
        *,
        bos: BosRule = "auto",
        has_eos: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._template = None if settings.chat_template is None else ChatTemplate(tokenizer, settings.chat_template)
        self._tool_template = ChatTemplate(tokenizer, settings.tool_template) if settings.tool_template else None
        written = (settings.chat_template or "") + settings.tool_template
        self._control = ControlTokens(tokenizer, written or None, settings.control_tokens)
        is_added = bos == "always" or (bos == "auto" and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id])
        self.begin = [tokenizer.bos_token_id] if is_added and tokenizer.bos_token_id is not None else []
        self._has_eos = has_eos

    def tokenise(self, samples: Sequence[tuple[str, Sample | Prompt]]) -> list[Tokens]:
        """Tokenise samples by one call of the tokenizer; a prompt gets the ids that a server would give the model.

        The first element of each pair is the location of the data row for messages (`file line 7`). DataError where a
        row cannot be tokenised.
        """
        rows = [self._sample_texts(sample, where) for where, sample in samples]
        texts = [text for row in rows for text in row]
        encoded = iter(self._control.ids([[segment.text for segment in text.segments] for text in texts]))
        results = []
        for (where, sample), row in zip(samples, rows, strict=True):
            is_chat = not isinstance(sample, PlainText) and self._template is not None
            *earlier, last = [self._tokens_of(text, next(encoded), is_chat=is_chat, where=where) for text in row]
            if earlier:
                differs = any(document.server_prompt_differs for document in (*earlier, last))
                last = replace(last, earlier=tuple(earlier), server_prompt_differs=differs)
            results.append(last)
        return results

    def _tokens_of(
        self, text: Tokens, encoded: Sequence[tuple[list[int], bool]], *, is_chat: bool, where: str
    ) -> Tokens:
        """Join the ids of a sample's segments. `encoded` has the ids of each segment, and whether the tokenizer would
        merge its beginning with the segment before it.
        """
        ids = [] if is_chat else list(self.begin)
        mask = [False] * len(ids)
        part = list[int]()
        for segment, (part, _) in zip(text.segments, encoded, strict=True):
            ids += part
            mask += [segment.is_supervised] * len(part)
        if text.segments and text.segments[-1].is_supervised and not is_chat and self._has_eos:
            # An EOS token is not added to a text that already ends with one.
            ends = [int(self._tokenizer.eos_token_id)] if part[-1:] != [self._tokenizer.eos_token_id] else []
            ids, mask = ids + ends, mask + [True] * len(ends)
        bos = self._tokenizer.bos_token_id
        if bos is not None and bos in ids[1:] and bos != self._tokenizer.eos_token_id:
            raise DataError(
                f"{where}: token {ids.index(bos, 1)} is a second {self._tokenizer.bos_token}",
                hint="the row's text contains it, or the chat template writes it twice",
            )
        is_joined = [is_merged for _, is_merged in encoded]
        answers = [number for number, segment in enumerate(text.segments) if segment.is_answer]
        notes = ("joined",) * any(is_joined[number] for number in answers)
        return replace(
            text,
            ids=ids,
            mask=mask,
            segments=(),
            # A server tokenises an earlier answer together with the text after it, which may give other tokens.
            server_prompt_differs=text.server_prompt_differs or any(is_joined[: answers[-1]] if answers else ()),
            notes=(*text.notes, *notes),
        )

    def _sample_texts(self, sample: Sample | Prompt, where: str) -> list[Tokens]:
        if is_prompt := isinstance(sample, Prompt):
            sample = sample.sample
        if self._template is not None and not isinstance(sample, PlainText):
            original = sample.conversation if isinstance(sample, Completion) else sample
            return self._chat_texts(original, where, is_prompt=is_prompt)
        if isinstance(sample, Conversation):
            raise DataError(
                f"{where} is a conversation and the tokenizer has no chat template",
                hint="set data.template to a name such as chatml, or to a Jinja file",
            )
        texts = [sample.text] if isinstance(sample, PlainText) else [sample.prompt, sample.completion]
        has_control = self._control.check_plain(texts, where)
        if isinstance(sample, Completion) and sample.conversation.messages[:-2] and not sample.has_all_turns:
            return [Tokens(dropped="plain")]
        remarks = {
            "control_plain": has_control,
            "tools": isinstance(sample, Completion) and sample.conversation.tools,
            "empty_answer": isinstance(sample, Completion) and not sample.completion.strip() and not is_prompt,
        }
        notes = tuple(name for name, applies in remarks.items() if applies)
        if isinstance(sample, PlainText):
            return [Tokens(segments=(Segment(sample.text, True),), notes=notes)]
        completion = strip_reasoning(sample.completion) if self._settings.reasoning == "strip" else sample.completion
        prompt = sample.prompt
        if not (sample.is_joined or prompt[-1:].isspace() or completion[:1].isspace()):
            prompt += self._settings.separator
        is_joined = completion[:1].isspace() and not prompt[-1:].isspace()
        form = sample.wrapper or ("joined" if is_joined else "separator")
        segments = Segment(prompt, self._settings.train_on == "all"), Segment(completion, True, is_answer=True)
        return [Tokens(segments=segments[: 1 if is_prompt else 2], notes=notes, form=form)]

    def _chat_texts(self, original: Conversation, where: str, *, is_prompt: bool) -> list[Tokens]:
        """Texts of a dialogue in its chat template: a server's prompt for it or, without `is_prompt`, a document for
        each rendering.
        """
        conversation, control_note = self._control.protect(original, where)
        # transformers would choose the same template: `tool_use`, if it exists, for a conversation with tools.
        template = (self._tool_template if conversation.tools else None) or self._template
        assert template is not None
        if template.probes.changed and not is_prompt:
            raise DataError(
                f"{where}: the chat template changes the texts of answers, as in {template.probes.changed!r}",
                hint="give a data.template that writes answers unchanged, as a model would write them",
            )
        unread = (*original.unread, *_unread_fields(conversation, template))
        try:
            adapted = adapt(conversation, template, self._settings.reasoning)
            dialogue = RenderedConversation(template, adapted, where, is_protected=bool(control_note))
            texts = [_open_prompt(dialogue)] if is_prompt else self._documents(dialogue, conversation.messages)
        except UnrenderedTextError as error:
            return [Tokens(dropped=str(error), unread=unread)]
        noted = (control_note,) if control_note else ()
        return [replace(text, notes=noted + text.notes, unread=unread) for text in texts]

    def _documents(self, dialogue: RenderedConversation, messages: Sequence[Mapping[str, Any]]) -> list[Tokens]:
        renderings = self._rendered_turns(dialogue, messages)
        for rendered, turns in renderings:
            rendered.check(turns)
        all_turns = [turn for _, turns in renderings for turn in turns]
        chosen = all_turns[-1:] if self._settings.train_on == "last_assistant" else all_turns
        answers = [turn.number for turn in chosen if turn.number < len(messages)]
        supervised = {number for number in answers if messages[number].get("weight", 1) != 0}
        remarks = {
            dialogue.role_note(): True,
            dialogue.tools_note("".join(turn.prompt for turn in renderings[-1][1])): True,
            "open_call": any(turn.is_open for turn in all_turns),
            "behind": all_turns[-1].number < len(messages) - 1,
            "empty_answer": any(not t.body.strip() for t in all_turns if t.number in supervised),
            "rewritten": len(renderings) > 1,
        }
        notes = tuple(note for note, applies in remarks.items() if note and applies)
        return [self._turn_segments(turns, supervised, rendered, Tokens(notes=notes)) for rendered, turns in renderings]

    def _rendered_turns(
        self, dialogue: RenderedConversation, messages: Sequence[Mapping[str, Any]]
    ) -> list[tuple[RenderedConversation, list[Turn]]]:
        """Renderings of the dialogue with their assistant turns; each rendering becomes a document. Usually there is
        one. If the template changes earlier turns when later ones follow, there is one for each supervised answer.
        """
        try:
            return [(dialogue, dialogue.turns())]
        except RewrittenTurnError:
            numbers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
            supervised = [n for n in numbers if messages[n].get("weight", 1) != 0] or numbers
            chosen = supervised if self._settings.train_on == "assistant" else numbers[-1:]
            return [(prefix, prefix.turns()) for prefix in dialogue.prefixes(chosen)]

    def _turn_segments(
        self, turns: Sequence[Turn], supervised: set[int], rendered: RenderedConversation, result: Tokens
    ) -> Tokens:
        segments: list[Segment] = []
        is_between_supervised = self._settings.train_on == "all"
        before, between, differs = "", "", False
        for turn in turns:
            before += turn.prompt
            between += turn.prompt
            answer, rest = "", turn.body + turn.ending
            if turn.number in supervised:
                prompt = rendered.server_prompt(turn.number)
                differs = differs or prompt is None or strip_brackets(prompt) != strip_brackets(before)
                ending = "" if turn.is_open else rendered.turn_end(turn)
                answer, rest = turn.body + ending, turn.ending.removeprefix(ending)
                segments += [Segment(between, is_between_supervised), Segment(answer, True, is_answer=True)]
                between = ""
            between += rest
            before += answer + rest
        segments.append(Segment(between, is_between_supervised))
        texts = tuple(segment for segment in segments if segment.text)
        return replace(result, segments=texts, server_prompt_differs=differs)


def _open_prompt(dialogue: RenderedConversation) -> Tokens:
    prompt = dialogue.open_prompt()
    notes = tuple(note for note in (dialogue.role_note(), dialogue.tools_note(prompt)) if note)
    return Tokens(segments=(Segment(prompt, False),), notes=notes)


def _unread_fields(conversation: Conversation, template: ChatTemplate) -> list[str]:
    messages = conversation.messages
    present = {f"{message['role']}.{key}" for message in messages for key in ("name", "tool_call_id") if key in message}
    if any("id" in call for message in messages for call in message.get("tool_calls") or ()):
        present.add("assistant.id")
    return sorted(f"{name} (not in the chat template)" for name in present - template.probes.fields)
