"""Token ids of the consecutive texts of a document, and control tokens inside the texts of a data row.

Each text of a document is encoded as a continuation of the text before it (`TextEncoder.encode`), since SentencePiece
tokenizers put a space before a text that they encode separately. A token never has characters of two texts: where the
tokenizer would merge the end of a prompt with the beginning of its answer, the prompt keeps the tokens that a server
makes of it, and the answer begins with a new token.

A row's text can contain a control token, such as `<|eos|>`. By default it is tokenised as plain text, so that only the
chat template writes real control tokens: `ControlTokens.protect` puts such texts in brackets, and `ControlTokens.ids`
tokenises bracketed texts as plain text.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ds_finetune.data.messages import Conversation, map_texts
from ds_finetune.errors import DataError

_CONTEXT, _CONTEXT_WITHOUT_ADDED = 64, 16
"""Numbers of characters before a text that can affect its first tokens, if an added token is among them, and if not."""


class TextEncoder:
    """Encodes texts as continuations of other texts, without adding special tokens."""

    def __init__(self, core: Tokenizer) -> None:
        self._core = core
        added = core.get_added_tokens_decoder().values()
        self._added = _any_of([unicodedata.normalize("NFC", token.content) for token in added])
        steps = [json.loads(part.__getstate__()) for part in (core.normalizer, core.pre_tokenizer) if part]
        self._adds_space = any(_without_space(step) != step for step in steps)
        self._is_cut_after_added = not self._adds_space and not any(
            token.lstrip or token.rstrip or token.single_word or " " in token.content for token in added
        )
        """Whether a text after an added token gets the ids that it would get at the start of a document."""

    def encode(self, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], bool]]:
        """Encode texts as continuations: `texts` are pairs of a text and the text before it, which is empty at the
        start of a document. Returns the ids of each text, and whether the tokenizer would merge its beginning with the
        text before it.
        """
        contexts = [self._context(before) if text else "" for text, before in texts]
        distinct = [*{*contexts, *(context + text for context, (text, _) in zip(contexts, texts, strict=True))}]
        # Truncation and padding are turned off, as transformers 5.23 does before each call of a tokenizer.
        self._core.no_truncation()
        self._core.no_padding()
        encodings = self._core.encode_batch_fast(distinct, add_special_tokens=False)
        ids = {text: encoding.ids for text, encoding in zip(distinct, encodings, strict=True)}
        results = []
        for context, (text, _) in zip(contexts, texts, strict=True):
            begin, both = ids[context], ids[context + text]
            own, is_merged = both[len(begin) :], both[: len(begin)] != begin
            if is_merged:
                core = self._without_added_space if self._adds_space else self._core
                own = core.encode(text, add_special_tokens=False).ids
            results.append((own, is_merged))
        return results

    def _context(self, before: str) -> str:
        """The end of `before`, from its last added token (if any), on which the next text's first tokens depend."""
        end = before[-_CONTEXT:]
        added = [match.span() for match in self._added.finditer(end)]
        if not added:
            return end[-_CONTEXT_WITHOUT_ADDED:]
        start, stop = added[-1]
        return "" if stop == len(end) and self._is_cut_after_added else end[start:]

    @cached_property
    def _without_added_space(self) -> Tokenizer:
        written = json.loads(self._core.to_str())
        for name in ("normalizer", "pre_tokenizer"):
            written[name] = _without_space(written[name])
        return Tokenizer.from_str(json.dumps(written))


def _without_space(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Copy a normalizer or pre-tokenizer so that it adds no space before a text; None if nothing remains of it."""
    if part is None or part["type"] == "Prepend":
        return None
    for steps in ("normalizers", "pretokenizers"):
        if steps in part:
            return {**part, steps: [step for inner in part[steps] if (step := _without_space(inner)) is not None]}
    changes: dict[str, dict[str, Any]] = {
        "Metaspace": {"prepend_scheme": "never"},
        "ByteLevel": {"add_prefix_space": False},
    }
    return {**part, **changes.get(part["type"], {})}


_OPEN, _CLOSE = "\ue0f3", "\ue0f4"
"""Brackets around a control token in a row's text; rows that contain these characters themselves are refused."""
_THINK = ("<think>", "</think>")


class ControlTokens:
    """Finds the control tokens of a tokenizer in texts, and tokenises them as plain text.

    In texts of users and tools, added tokens that the template writes also count as control tokens. `choice` is
    data.control_tokens: `text`, `keep` or `refuse`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None, choice: str) -> None:
        self._tokenizer, self._choice = tokenizer, choice
        self._encoder = TextEncoder(tokenizer.backend_tokenizer)
        added = tokenizer.added_tokens_decoder.values()
        special = [token.content for token in added if token.special]
        written = [
            token.content for token in added if template and token.content in template and not token.content.isspace()
        ]
        # `<think>` and added tokens for tool calls are not control tokens in answers and system texts.
        of_answers = _any_of([token for token in special if token not in _THINK])
        of_users = _any_of([*special, *written])
        self._patterns = {"system": of_answers, "assistant": of_answers, "user": of_users, "tool": of_users}
        self._as_text: dict[str, list[int]] = {}

    def check_plain(self, texts: Sequence[str], where: str) -> bool:
        """Whether texts without a template contain a special token; DataError if data.control_tokens is `refuse`."""
        is_present = any(self._patterns["system"].search(text) for text in texts)
        if is_present and self._choice == "refuse":
            raise DataError(
                f"{where}: a text contains a control token of the tokenizer: {texts[0]!r:.60}",
                hint="set data.control_tokens: keep",
            )
        return is_present

    def protect(self, conversation: Conversation, where: str) -> tuple[Conversation, str]:
        """Put control tokens in the conversation's texts into brackets. Also returns a remark (a key of
        `row_report.NOTED`), which is empty if there are no control tokens.

        With `keep` the conversation is not changed; with `refuse` a control token is a DataError.
        """
        present: list[str] = []

        def look(role: str, text: str) -> str:
            present.extend(self._patterns[role].findall(text))
            return text

        map_texts(conversation, look)
        if not present:
            return conversation, ""
        if self._choice == "refuse":
            raise DataError(
                f"{where}: a text contains the control token {present[0]}",
                hint="correct the row, or set data.control_tokens to text or keep",
            )
        if self._choice == "keep":
            return conversation, "control_keep"
        bracketed = f"{_OPEN}\\g<0>{_CLOSE}"
        return map_texts(conversation, lambda role, text: self._patterns[role].sub(bracketed, text)), "control_text"

    def ids(self, documents: Sequence[Sequence[str]]) -> list[list[tuple[list[int], bool]]]:
        """Token ids of the consecutive texts of each document, from one call of the tokenizer, and for each text
        whether the tokenizer would merge its beginning with the end of the text before it.
        """
        plain: list[tuple[str, str]] = []
        parts: list[list[list[str]]] = []
        for texts in documents:
            before = ""
            parts.append([re.split(f"{_OPEN}(.*?){_CLOSE}", text) if _OPEN in text else [text] for text in texts])
            for pieces in parts[-1]:
                for number, piece in enumerate(pieces[::2]):
                    # A chat template may cut a bracketed control token in two, so single brackets are removed. The
                    # text after a bracketed control token is encoded as if it followed a line feed, as in
                    # transformers.
                    plain.append((strip_brackets(piece), "\n" if number else before))
                    before = plain[-1][0] or before
                before = "\n" if len(pieces) > 1 and not pieces[-1] else before
        encoded = iter(self._encoder.encode(plain))
        return [[self._joined(pieces, encoded) for pieces in of_document] for of_document in parts]

    def _joined(self, pieces: Sequence[str], encoded: Iterator[tuple[list[int], bool]]) -> tuple[list[int], bool]:
        ids, is_merged = next(encoded)
        ids = list(ids)
        for token in pieces[1::2]:
            ids += self._text_ids(token) + next(encoded)[0]
        return ids, is_merged

    def _text_ids(self, token: str) -> list[int]:
        """Token ids of a control token's characters, as by `apply_chat_template(..., sanitize_control_tokens=True)`."""
        if token not in self._as_text:
            ids = _character_ids(self._tokenizer, token)
            if self._tokenizer.convert_tokens_to_ids(token) in ids:
                raise DataError(
                    f"the tokenizer cannot tokenise the control token {token} as plain text",
                    hint="set data.control_tokens to keep or refuse",
                )
            self._as_text[token] = ids
        return self._as_text[token]


def strip_brackets(text: str) -> str:
    """Remove the brackets that `ControlTokens.protect` put around control tokens."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def find_token(token: str, text: str) -> list[int]:
    """Positions where the chat template wrote `token` in `text`. Tokens of the data row have brackets around them."""
    return [match.start() for match in re.finditer(f"(?<!{_OPEN}){re.escape(token)}", text)] if token else []


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(set(tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _character_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text's characters, in which no control token is recognised.

    The text is tokenised after a newline, so that SentencePiece does not add a space before it.
    """
    core = tokenizer.backend_tokenizer

    def ids(characters: str) -> list[int]:
        characters = core.normalizer.normalize_str(characters) if core.normalizer is not None else characters
        parts = [(characters, None)]
        if core.pre_tokenizer is not None:
            parts = core.pre_tokenizer.pre_tokenize_str(characters)
        return [token.id for part, _ in parts for token in core.model.tokenize(part)]

    newline, both = ids("\n"), ids("\n" + text)
    return both[len(newline) :] if both[: len(newline)] == newline else ids(text)
