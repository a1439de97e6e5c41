"""Token ids of texts from a cache of their words.

Half of the time of a preparation is the tokenizer's, most of it in the regular expressions that split a text into
words, and a data set has few distinct words. For tokenizers whose expressions are known (`_CUTS`), a text is cut here
at spaces, each distinct piece is encoded once, and the ids of a text are those of its pieces. Every other tokenizer
encodes whole texts.

A cut before a space is exact if (1) no expression matches both the character before the space and the space, (2) no
expression has a look-behind, and (3) look-aheads only test for the end of white space. Then the words on both sides are
those of the whole text, and byte-level BPE merges only within words. (1) holds for the characters of `_CUTS`: letters
and digits, and the signs that an expression of its own matches. NFC composes nothing across a space, and added tokens
have no spaces and do not strip them (`_has_plain_added_tokens`).

A new piece of ASCII characters is cut further (`_PART`), because most distinct pieces differ by numbers and
punctuation: after letters, after digits, and between a sign and a digit. None of the expressions matches characters on
both sides of such a cut. White space is never cut from the text after it, so look-aheads see the same text. Pieces with
an added token that would be cut stay whole.

Consecutive texts of a document are encoded as continuations of each other (`encode_after`), since SentencePiece
tokenizers put a space before a text that they encode separately. A token never has characters of two texts: where the
tokenizer would merge the end of a prompt with the beginning of its answer, the prompt keeps the tokens that a server
makes of it, and the answer begins with a new token.

A row's text can contain a control token, such as `<|eos|>`. By default it is tokenised as plain text, so that only the
chat template writes real control tokens: `ControlTokens.protect` puts such texts in brackets, and `ControlTokens.ids`
tokenises bracketed texts as plain text.
"""

import hashlib
import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ds_finetune.data.messages import Conversation, map_texts
from ds_finetune.errors import DataError

_ANY_SIGN = r"!-~"
_PUNCTUATION = r"0-9A-Za-z!\"#%&'()*,\-./:;?@\[\\\]_{}"
"""Letters, digits, and the signs of Unicode's class P."""
_CUTS: Mapping[str, str] = {
    "2d98886545175e55": _PUNCTUATION,  # DeepSeek Coder: signs outside class P join the space after them
    "308bc0fc18f7896c": _ANY_SIGN,  # DeepSeek LLM, V2
    "8e9a9de6f59e7d8e": _ANY_SIGN,  # DeepSeek V3
    "ec3ddd824c16ec63": _ANY_SIGN,  # Qwen 2, 2.5 and 3
    "37cdc9d768b5f12d": _ANY_SIGN,  # Llama 3, GLM
}
"""Characters after which a space begins a word, by the digest of a tokenizer (`_digest`)."""
_PART = re.compile(r"[0-9]+|[^0-9A-Za-z]*(?:[A-Za-z]+|(?<=\s)[0-9]+)|[^0-9A-Za-z]+")
"""A part of an ASCII piece: digits, letters with the signs before them, or signs."""
_MOST_PIECES = 500_000
"""Maximum number of cached pieces; an English one takes about 300 bytes."""
_PIECES_PER_TEXT = 500
"""Number of pieces that are encoded as one text."""
_LONGEST_KEPT = 32
"""Maximum characters of a cached piece. Longer ones, as in texts without spaces, seldom occur again."""
_CONTEXT, _CONTEXT_WITHOUT_ADDED = 64, 16
"""Number of preceding characters on which the first tokens of a text depend, with and without an added token among
them."""


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> "TextEncoder":
    """The cached encoder of `tokenizer`; a new one after the tokenizer has changed."""
    core = tokenizer.backend_tokenizer
    state = (core.get_vocab_size(), _digest(core))
    if tokenizer not in _encoders or _encoders[tokenizer].state != state:
        _encoders[tokenizer] = TextEncoder(core, state)
    return _encoders[tokenizer]


class TextEncoder:
    """Encodes texts without adding special tokens."""

    def __init__(self, core: Tokenizer, state: tuple[int, str]) -> None:
        self._core = core
        self.state = state
        before = _CUTS.get(state[1]) if _has_plain_added_tokens(core) else None
        # `re` searches fastest for patterns that begin with a literal.
        self._cut = None if before is None else re.compile(f" (?<=[{before}] )")
        self._ends_like_a_cut = re.compile(f"[{before}]\\Z")
        self._first: dict[str, list[int]] = {}
        """Cache: token ids of a piece of text (up to the next space) that begins a text."""
        self._later: dict[str, list[int]] = {}
        """Cache: token ids of a piece that follows a space; the key is the piece without the space."""
        self._inner: dict[str, list[int]] = {}
        """Ids of the second and later parts of pieces."""
        contents = [unicodedata.normalize("NFC", token.content) for token in core.get_added_tokens_decoder().values()]
        self._uncut = re.compile(
            "|".join(re.escape(text) for text in contents if len(_PART.findall(text)) > 1) or "(?!)"
        )
        """Matches added tokens that `_PART` would cut."""
        longest_first = sorted(contents, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._adds_space = any(_without_space(step) != step for step in chain(*_splitting_steps(core)))
        self._is_cut_after_added = not self._adds_space and _has_plain_added_tokens(core)
        """Whether a text has the same ids after an added token as at the start of a text."""

    @property
    def is_by_word(self) -> bool:
        """Whether texts are cut into cached pieces."""
        return self._cut is not None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        if self._cut is None:
            return self._encode_whole(texts)
        pieces = [self._cut.split(text) for text in texts]
        first = {parts[0] for parts in pieces} - self._first.keys()
        # First pieces are included needlessly, which does no harm.
        later = set(chain.from_iterable(pieces)) - self._later.keys()
        self._first.update(zip(first, self._encode_whole([*first]), strict=True))
        begins = self._learn(later)
        of_piece = self._later.__getitem__
        found = [[*self._first[parts[0]], *chain.from_iterable(map(of_piece, parts[1:]))] for parts in pieces]
        _forget(self._first, first)
        _forget(self._later, later | begins)
        return found

    def encode_after(self, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], bool]]:
        """For each pair (text, preceding text): ids of the text as a continuation, and whether the tokenizer would
        merge characters of both in one token.

        The preceding text is empty at the start of a document.
        """
        contexts = [self._context(before) if text else "" for text, before in texts]
        wanted = [*contexts, *(context + text for context, (text, _) in zip(contexts, texts, strict=True))]
        distinct = list(dict.fromkeys(wanted))
        ids = dict(zip(distinct, self.encode(distinct), strict=True))
        found = []
        for context, (text, _) in zip(contexts, texts, strict=True):
            begin, both = ids[context], ids[context + text]
            is_merged = both[: len(begin)] != begin
            found.append((self._encode_inside(text) if is_merged else both[len(begin) :], is_merged))
        return found

    def _context(self, before: str) -> str:
        """The end of a text on which the next text's first tokens depend, at most from its last added token on."""
        end = before[-_CONTEXT:]
        added = [match.span() for match in self._added.finditer(end)]
        if not added:
            return end[-_CONTEXT_WITHOUT_ADDED:]
        start, stop = added[-1]
        return "" if stop == len(end) and self._is_cut_after_added else end[start:]

    def _encode_inside(self, text: str) -> list[int]:
        """Ids of a text inside a longer one, tokenised separately and without an added space."""
        if not self._adds_space:
            return self.encode([text])[0]
        return self._inside.encode(text, add_special_tokens=False).ids

    @cached_property
    def _inside(self) -> Tokenizer:
        """The tokenizer without the step that prepends a space to a text."""
        written = json.loads(self._core.to_str())
        for name in ("normalizer", "pre_tokenizer"):
            written[name] = _without_space(written[name])
        return Tokenizer.from_str(json.dumps(written))

    def _learn(self, later: Collection[str]) -> set[str]:
        """Cache the ids of pieces after a space, made of their parts' ids; returns the new first parts."""
        parts = {piece: self._parts(piece) for piece in later}
        begins = {each[0] for each in parts.values()} - self._later.keys()
        inner = {part for each in parts.values() for part in each[1:]} - self._inner.keys()
        self._later.update(self._encode_later(begins))
        self._inner.update(zip(inner, self._encode_whole([*inner]), strict=True))
        of_part = self._inner.__getitem__
        for piece, (begin, *others) in parts.items():
            if others:
                self._later[piece] = [*self._later[begin], *chain.from_iterable(map(of_part, others))]
        _forget(self._inner, inner)
        return begins

    def _parts(self, piece: str) -> list[str]:
        if not piece or not piece.isascii() or self._uncut.search(piece):
            return [piece]
        return _PART.findall(piece)

    def _encode_whole(self, texts: Sequence[str]) -> list[list[int]]:
        # transformers 5.23 does this before each call of the tokenizer.
        self._core.no_truncation()
        self._core.no_padding()
        return [encoding.ids for encoding in self._core.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_later(self, pieces: Collection[str]) -> dict[str, list[int]]:
        """Ids of each piece after a space.

        Pieces that end where a text may be cut are joined to long texts first, since each text of a call has a cost.
        """
        joined = [piece for piece in pieces if self._ends_like_a_cut.search(piece)]
        alone = [*set(pieces).difference(joined)]
        found = dict(zip(alone, self._encode_whole([f" {piece}" for piece in alone]), strict=True))
        groups = [joined[at : at + _PIECES_PER_TEXT] for at in range(0, len(joined), _PIECES_PER_TEXT)]
        texts = ["".join(f" {piece}" for piece in group) for group in groups]
        for group, encoding in zip(groups, self._core.encode_batch(texts, add_special_tokens=False), strict=True):
            ids, ends = encoding.ids, [end for _, end in encoding.offsets]
            done = 0
            for piece, end in zip(group, accumulate(len(piece) + 1 for piece in group), strict=True):
                last = bisect_right(ends, end, done)
                found[piece] = ids[done:last]
                done = last
            assert done == len(ids)
        return found


def _forget(known: dict[str, list[int]], added: Collection[str]) -> None:
    """Remove long pieces among `added` from the cache, or clear the cache if it is too large."""
    if len(known) > _MOST_PIECES:
        known.clear()
    for piece in added:
        if len(piece) > _LONGEST_KEPT:
            known.pop(piece, None)


_encoders: WeakKeyDictionary[PreTrainedTokenizerBase, TextEncoder] = WeakKeyDictionary()


def _has_plain_added_tokens(core: Tokenizer) -> bool:
    added = core.get_added_tokens_decoder().values()
    return not any(token.lstrip or token.rstrip or token.single_word or " " in token.content for token in added)


def _digest(core: Tokenizer) -> str:
    """Digest of everything that decides how a text is split into words and merged, except vocabulary and merges."""
    model = core.model
    parts: list[object] = [
        _splitting_steps(core),
        type(model).__name__,
        [getattr(model, name, None) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _splitting_steps(core: Tokenizer) -> list[list[dict[str, Any]]]:
    """Steps of the normalizer, and steps of the pre-tokenizer."""
    return [_steps(json.loads(part.__getstate__())) if part else [] for part in (core.normalizer, core.pre_tokenizer)]


def _without_space(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A copy of a normalizer or pre-tokenizer that adds no space before a text; None if no step is left."""
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


def _steps(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps of a normalizer or pre-tokenizer in a canonical form, without settings that affect only offsets."""
    if part["type"] == "Sequence":
        return [step for inner in part.get("pretokenizers", part.get("normalizers", ())) for step in _steps(inner)]
    step = {name: value for name, value in part.items() if name != "trim_offsets"}
    if "Regex" in step.get("pattern", ""):
        step["pattern"] = step["pattern"]["Regex"].replace("\r", "\\r").replace("\n", "\\n")
    return [step]


_OPEN, _CLOSE = "\ue0f3", "\ue0f4"
"""Brackets around a control token in a row's text. Rows with them are refused (`messages.RESERVED_CHARACTERS`)."""
_THINK = ("<think>", "</think>")


class ControlTokens:
    """Finds the control tokens of a tokenizer in texts, and tokenises them as plain text.

    In texts of users and tools, added tokens that the template writes also count as control tokens. `choice` is
    data.control_tokens: `text`, `keep` or `refuse`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None, choice: str) -> None:
        self._tokenizer = tokenizer
        self._choice = choice
        added = tokenizer.added_tokens_decoder.values()
        special = [token.content for token in added if token.special]
        written = [
            token.content for token in added if template and token.content in template and not token.content.isspace()
        ]
        # Answers and system prompts may have added tokens for reasoning and tool calls.
        own = _pattern([token for token in special if token not in _THINK])
        foreign = _pattern([*special, *written])
        self._patterns = {"system": own, "assistant": own, "user": foreign, "tool": foreign}
        self._as_text: dict[str, list[int]] = {}

    def has_control_token(self, text: str) -> bool:
        """Whether a text that no template renders contains a special token."""
        return bool(self._patterns["system"].search(text))

    def protect(self, conversation: Conversation, where: str) -> tuple[Conversation, str]:
        """Put the conversation's control tokens in brackets; the second result is a key of `row_report.NOTED`, empty
        without any.

        With `keep` the conversation is not changed; with `refuse` a control token is a DataError.
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
        bracketed = f"{_OPEN}\\g<0>{_CLOSE}"
        return map_texts(conversation, lambda text, role: self._patterns[role].sub(bracketed, text)), "control_text"

    def ids(self, documents: Sequence[Sequence[str]]) -> list[list[tuple[list[int], bool]]]:
        """For each document: ids of its consecutive texts, from one call of the tokenizer, and whether the tokenizer
        would merge the beginning of a text with the end of the text before it.
        """
        plain: list[tuple[str, str]] = []
        parts: list[list[list[str]]] = []
        for texts in documents:
            before = ""
            parts.append([re.split(f"{_OPEN}(.*?){_CLOSE}", text) if _OPEN in text else [text] for text in texts])
            for pieces in parts[-1]:
                for number, piece in enumerate(pieces[::2]):
                    # A template may cut a text between the brackets of a token. transformers encodes a text after the
                    # characters of a control token as it does after a line feed.
                    plain.append((strip_brackets(piece), "\n" if number else before))
                    before = plain[-1][0] or before
                before = "\n" if len(pieces) > 1 and not pieces[-1] else before
        encoded = iter(text_encoder(self._tokenizer).encode_after(plain))
        return [[self._joined(pieces, encoded) for pieces in of_document] for of_document in parts]

    def _joined(self, pieces: Sequence[str], encoded: Iterator[tuple[list[int], bool]]) -> tuple[list[int], bool]:
        """Ids of a text of `pieces`, alternately plain and a control token; `encoded` has the plain pieces' ids."""
        ids, is_merged = next(encoded)
        ids = list(ids)
        for token in pieces[1::2]:
            ids += self._text_ids(token) + next(encoded)[0]
        return ids, is_merged

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


def strip_brackets(text: str) -> str:
    """Remove the brackets of `ControlTokens.protect`."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def find_token(token: str, text: str) -> list[int]:
    """Positions of the token in `text` outside brackets, where the template has written it."""
    return [match.start() for match in re.finditer(f"(?<!{_OPEN}){re.escape(token)}", text)] if token else []


def _pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(set(tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _character_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text, never of added tokens.

    The text is tokenised after a newline, so that SentencePiece does not add a space before it.
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
