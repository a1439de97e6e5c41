"""Token ids of texts from a cache of their words.

Half of the time of a preparation is the tokenizer's, most of it in the regular expressions that cut a text into words,
and a data set has few different words. For tokenizers whose expressions are known (`_CUTS`), a text is cut here at
spaces, each different piece is encoded once, and the ids of a text are those of its pieces. Every other tokenizer
encodes whole texts.

A cut before a space is exact where (1) no expression matches both the character before the space and the space, (2)
none looks back, and (3) what looks ahead looks for the end of white space. Then the words to the left and to the right
are those of the whole text, and byte-level BPE merges only within words. (1) holds for the characters of `_CUTS`:
letters and digits, and the signs that an expression of its own matches. NFC composes nothing across a space, and added
tokens have no spaces and do not strip them (`_has_plain_added_tokens`).

A new piece of ASCII characters is cut further (`_PART`), because numbers and punctuation make most of the different
pieces: after letters, after digits, and between a sign and a digit. None of the expressions matches characters on both
sides of such a cut. White space is never cut from what is behind it, so what looks ahead sees the same. Pieces with an
added token that would be cut stay whole.

Consecutive texts of a document are encoded as continuations of each other (`encode_after`), since SentencePiece
tokenizers put a space before a text that they encode alone. A token never has characters of two texts: where the
tokenizer would merge the end of a prompt with the beginning of its answer, the prompt keeps the tokens that a server
makes of it, and the answer begins with a token of its own.

A row can bring a control token of its own, such as `<|eos|>`, in a text. By default it is tokenised as plain text, so
that only the chat template writes real control tokens: `ControlTokens.protect` puts such texts in brackets, and
`ControlTokens.ids` tokenises bracketed texts as plain text.
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
    "2d98886545175e55": _PUNCTUATION,  # DeepSeek Coder: signs that are no punctuation belong to the space behind them
    "308bc0fc18f7896c": _ANY_SIGN,  # DeepSeek LLM, V2
    "8e9a9de6f59e7d8e": _ANY_SIGN,  # DeepSeek V3
    "ec3ddd824c16ec63": _ANY_SIGN,  # Qwen 2, 2.5 and 3
    "37cdc9d768b5f12d": _ANY_SIGN,  # Llama 3, GLM
}
"""Characters after which a space begins a word, by the digest of the tokenizer's parts (`_digest`)."""
_PART = re.compile(r"[0-9]+|[^0-9A-Za-z]*(?:[A-Za-z]+|(?<=\s)[0-9]+)|[^0-9A-Za-z]+")
"""A part of a piece of ASCII characters: digits, letters with the signs before them, or signs."""
_MOST_PIECES = 500_000
"""Pieces that are kept; one of English takes about 300 bytes."""
_PIECES_PER_TEXT = 500
"""Pieces that are encoded as one text."""
_LONGEST_KEPT = 32
"""Characters of a piece that is kept. Longer ones (a text without spaces) are seldom found again."""
_CONTEXT, _CONTEXT_WITHOUT_ADDED = 64, 16
"""Characters of the text before a text, on which its first tokens depend, and those where no added token is among
them."""


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> "TextEncoder":
    """The encoder of `tokenizer`, the same one until the tokenizer is changed or gone."""
    core = tokenizer.backend_tokenizer
    state = (core.get_vocab_size(), _digest(core))
    if tokenizer not in _encoders or _encoders[tokenizer].state != state:
        _encoders[tokenizer] = TextEncoder(core, state)
    return _encoders[tokenizer]


class TextEncoder:
    """Encodes texts without special tokens around them."""

    def __init__(self, core: Tokenizer, state: tuple[int, str]) -> None:
        self._core = core
        self.state = state
        before = _CUTS.get(state[1]) if _has_plain_added_tokens(core) else None
        # A pattern that begins with a literal is searched for it.
        self._cut = None if before is None else re.compile(f" (?<=[{before}] )")
        self._ends_like_a_cut = re.compile(f"[{before}]\\Z")
        self._first: dict[str, list[int]] = {}
        """Ids of pieces at the start of a text."""
        self._later: dict[str, list[int]] = {}
        """Ids of pieces with a space before them, by the piece without it."""
        self._inner: dict[str, list[int]] = {}
        """Ids of parts of pieces behind the first part."""
        contents = [unicodedata.normalize("NFC", token.content) for token in core.get_added_tokens_decoder().values()]
        self._uncut = re.compile(
            "|".join(re.escape(text) for text in contents if len(_PART.findall(text)) > 1) or "(?!)"
        )
        """Finds the added tokens that are not one part."""
        longest_first = sorted(contents, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._adds_space = any(_without_space(step) != step for step in chain(*_splitting_steps(core)))
        self._is_cut_after_added = not self._adds_space and _has_plain_added_tokens(core)
        """Whether a text has the same ids after an added token as alone."""

    @property
    def is_by_word(self) -> bool:
        """Whether texts are cut into pieces."""
        return self._cut is not None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        if self._cut is None:
            return self._encode_whole(texts)
        pieces = [self._cut.split(text) for text in texts]
        first = {parts[0] for parts in pieces} - self._first.keys()
        # The first pieces among them do no harm.
        later = set(chain.from_iterable(pieces)) - self._later.keys()
        self._first.update(zip(first, self._encode_whole([*first]), strict=True))
        begins = self._learn(later)
        of_piece = self._later.__getitem__
        found = [[*self._first[parts[0]], *chain.from_iterable(map(of_piece, parts[1:]))] for parts in pieces]
        _forget(self._first, first)
        _forget(self._later, later | begins)
        return found

    def encode_after(self, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], bool]]:
        """For each pair of a text and the text before it: the ids of the first as the continuation of the second, and
        whether a token of the two together would have characters of both.

        The text before is empty at the start of a document.
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
        """The end of a text on which the first tokens of the next one depend: from its last added token on, at most."""
        end = before[-_CONTEXT:]
        added = [match.span() for match in self._added.finditer(end)]
        if not added:
            return end[-_CONTEXT_WITHOUT_ADDED:]
        start, stop = added[-1]
        return "" if stop == len(end) and self._is_cut_after_added else end[start:]

    def _encode_inside(self, text: str) -> list[int]:
        """Ids of a text inside a longer one, of which it has its own tokens."""
        if not self._adds_space:
            return self.encode([text])[0]
        return self._inside.encode(text, add_special_tokens=False).ids

    @cached_property
    def _inside(self) -> Tokenizer:
        """The tokenizer without the step that puts a space before a text."""
        written = json.loads(self._core.to_str())
        for name in ("normalizer", "pre_tokenizer"):
            written[name] = _without_space(written[name])
        return Tokenizer.from_str(json.dumps(written))

    def _learn(self, later: Collection[str]) -> set[str]:
        """Add the ids of pieces with a space before them, each from those of its parts; the new first parts."""
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
        # As transformers 5.23 does before each call of the tokenizer.
        self._core.no_truncation()
        self._core.no_padding()
        return [encoding.ids for encoding in self._core.encode_batch_fast(texts, add_special_tokens=False)]

    def _encode_later(self, pieces: Collection[str]) -> dict[str, list[int]]:
        """The ids of each piece when a space stands before it.

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
    """Drop long pieces among `added`, and all where there are too many."""
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
    """A digest of all that decides how a text becomes words and how words are merged, without vocabulary and merges."""
    model = core.model
    parts: list[object] = [
        _splitting_steps(core),
        type(model).__name__,
        [getattr(model, name, None) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _splitting_steps(core: Tokenizer) -> list[list[dict[str, Any]]]:
    """The steps of the normalizer, and those of the pre-tokenizer."""
    return [_steps(json.loads(part.__getstate__())) if part else [] for part in (core.normalizer, core.pre_tokenizer)]


def _without_space(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer, or one of its steps, that puts no space before a text; None if no step is left."""
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
    """The steps of a normalizer or pre-tokenizer, alike for different ways to write the same; offsets do not count."""
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
        bracketed = f"{_OPEN}\\g<0>{_CLOSE}"
        return map_texts(conversation, lambda text, role: self._patterns[role].sub(bracketed, text)), "control_text"

    def ids(self, documents: Sequence[Sequence[str]]) -> list[list[tuple[list[int], bool]]]:
        """Token ids of the consecutive texts of each document, from one call of the tokenizer, and whether it would
        join the beginning of a text and the end of the text before it in one token.
        """
        plain: list[tuple[str, str]] = []
        parts: list[list[list[str]]] = []
        for texts in documents:
            before = ""
            parts.append([re.split(f"{_OPEN}(.*?){_CLOSE}", text) if _OPEN in text else [text] for text in texts])
            for pieces in parts[-1]:
                for number, piece in enumerate(pieces[::2]):
                    # A template may cut a text between the two brackets of a token. Behind the characters of a control
                    # token, transformers encodes a text as it does behind a line feed.
                    plain.append((strip_brackets(piece), "\n" if number else before))
                    before = plain[-1][0] or before
                before = "\n" if len(pieces) > 1 and not pieces[-1] else before
        encoded = iter(text_encoder(self._tokenizer).encode_after(plain))
        return [[self._joined(pieces, encoded) for pieces in of_document] for of_document in parts]

    def _joined(self, pieces: Sequence[str], encoded: Iterator[tuple[list[int], bool]]) -> tuple[list[int], bool]:
        """Ids of a text of `pieces`, of which every other one is a control token; `encoded` has those of the others."""
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
