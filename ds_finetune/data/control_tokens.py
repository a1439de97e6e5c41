"""Control tokens (special tokens such as `<|eos|>`) inside the texts of a row.

A row can bring its own `<|eos|>` in a text. By default it is tokenised as plain text, so that only the chat template
writes real control tokens: `protect` puts such texts in brackets, and `ids` tokenises bracketed texts as plain text.
"""

import re
from collections.abc import Sequence
from itertools import chain

from transformers import PreTrainedTokenizerBase

from ds_finetune.data.messages import Conversation, map_texts
from ds_finetune.data.text_encoder import text_encoder
from ds_finetune.errors import DataError

_OPEN, _CLOSE = "\ue0f3", "\ue0f4"
"""Brackets around a control token in a row's text. Rows with them are refused (`messages.RESERVED_CHARACTERS`)."""
_THINK = ("<think>", "</think>")


class ControlTokens:
    """Finds the control tokens of a tokenizer in texts, and tokenises them as plain text.

    In texts of users and tools, added tokens that the template writes count as control tokens too.
    `choice` is data.control_tokens: `text`, `keep` or `refuse`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None, choice: str) -> None:
        self._tokenizer = tokenizer
        self._choice = choice
        added = tokenizer.added_tokens_decoder.values()
        special = [token.content for token in added if token.special]
        written = [
            token.content for token in added if template and token.content in template and not token.content.isspace()
        ]
        # Answers contain tokens for reasoning and tool calls, and system prompts explain them.
        own = _pattern([token for token in special if token not in _THINK])
        foreign = _pattern([*special, *written])
        self._patterns = {"system": own, "assistant": own, "user": foreign, "tool": foreign}
        self._as_text: dict[str, list[int]] = {}

    def has_control_token(self, text: str) -> bool:
        """Whether a text contains a special token; for texts to which no template is applied."""
        return bool(self._patterns["system"].search(text))

    def protect(self, conversation: Conversation, where: str) -> tuple[Conversation, str]:
        """The conversation with its control tokens in brackets, and a key of `row_report.NOTED`, empty if it has none.

        With the choice `keep` the conversation is not changed; with `refuse` a control token is a DataError.
        """
        present: list[str] = []

        def look(text: str, role: str) -> str:
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
        return map_texts(conversation, self._add_brackets), "control_text"

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text without added special tokens, from one call of the tokenizer."""
        pieces = [re.split(f"{_OPEN}(.*?){_CLOSE}", text) if _OPEN in text else [text] for text in texts]
        # A template may cut a text between the two brackets of a token.
        plain = [strip_brackets(piece) for parts in pieces for piece in parts[::2]]
        distinct = list(dict.fromkeys(plain))
        encoded = dict(zip(distinct, text_encoder(self._tokenizer).encode(distinct), strict=True))
        found, at = [], 0
        for parts in pieces:
            pure = [encoded[text] for text in plain[at : at + len(parts[::2])]]
            at += len(pure)
            marked = [self._text_ids(part) for part in parts[1::2]]
            found.append(pure[0] if not marked else _interleaved(pure, marked))
        return found

    def _add_brackets(self, text: str, role: str) -> str:
        return self._patterns[role].sub(f"{_OPEN}\\g<0>{_CLOSE}", text)

    def _text_ids(self, token: str) -> list[int]:
        """Ids of the characters of a control token.

        They equal those of transformers' `apply_chat_template(..., sanitize_control_tokens=True)`.
        """
        if token not in self._as_text:
            ids = _character_ids(self._tokenizer, token)
            if self._tokenizer.convert_tokens_to_ids(token) in ids:
                raise DataError(
                    f"the tokenizer has no other ids for the text {token}",
                    hint="set data.control_tokens to keep or refuse",
                )
            self._as_text[token] = ids
        return self._as_text[token]


def _interleaved(pure: Sequence[list[int]], marked: Sequence[list[int]]) -> list[int]:
    """The ids of texts, each followed by those of the control token after it."""
    parts = [*chain.from_iterable(zip(pure, marked, strict=False)), pure[-1]]
    return [*chain.from_iterable(parts)]


def strip_brackets(text: str) -> str:
    """A text without the brackets of `ControlTokens.protect`."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def find_token(token: str, text: str) -> list[int]:
    """Positions of the token in `text` outside brackets: those that the template has written."""
    return [match.start() for match in re.finditer(f"(?<!{_OPEN}){re.escape(token)}", text)] if token else []


def _pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(set(tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _character_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text without added tokens.

    It is tokenised after a newline, so that SentencePiece does not add a space before it.
    """
    core = tokenizer.backend_tokenizer

    def ids(whole: str) -> list[int]:
        whole = core.normalizer.normalize_str(whole) if core.normalizer is not None else whole
        parts = (
            [part for part, _ in core.pre_tokenizer.pre_tokenize_str(whole)]
            if core.pre_tokenizer is not None
            else [whole]
        )
        return [token.id for part in parts for token in core.model.tokenize(part)]

    newline, both = ids("\n"), ids("\n" + text)
    return both[len(newline) :] if both[: len(newline)] == newline else ids(text)
