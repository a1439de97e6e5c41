"""Makes documents from records: reads each record as a sample, tokenises it, and applies the length limit.

If the loss is not a sum over tokens, a pair becomes two documents, and a labelled completion, a labelled text or a
prompt becomes one. Dropped rows are counted by reason.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ds_finetune.config.objectives import KindName
from ds_finetune.data.documents import (
    BAD_ROWS_SHOWN,
    Counts,
    Documents,
    LengthLimit,
    NamedCounts,
    TokenisedDocument,
)
from ds_finetune.data.files import ReadRecord, Record
from ds_finetune.data.preferences import Preference
from ds_finetune.data.prompts import Prompt
from ds_finetune.data.record_layouts import Completion, LabelledCompletion, LabelledText, PlainText, Sample
from ds_finetune.data.row_kind import DIALOGUE, RowKind
from ds_finetune.data.sample_tokens import RULES_VERSION, SampleTokeniser, TemplateSettings, Tokens
from ds_finetune.data.samples import RowSample, read_row
from ds_finetune.data.text_encoder import ControlTokens
from ds_finetune.data.tokenizer_files import is_encoder_tokenizer, tokenizer_digest
from ds_finetune.errors import DataError

_MOST_CHARACTERS, _MOST_CHARACTERS_PER_TOKEN = 4_000_000, 8
_MOST_MESSAGES = 2_000
ROWS_PER_PART, _FEWEST_BAD_ROWS = 2000, 100
_NOTED_CHARACTERS = {
    "windows_lines": (re.compile(r"\\r\\n"), re.compile("\r\n")),
    "conversion": (
        re.compile(r"\\x[0189]|\\x7f|\\ufe?ff|\\ufffe|\ufffd"),
        re.compile("[\0-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufffd-\uffff]"),
    ),
}
"""For each remark on unusual characters (`row_report.NOTED`): a pattern for a row's repr, and one for a text."""
_Ids = tuple[list[int], list[bool]]


class MadeRow(NamedTuple):
    """Documents made of one data row; none if the row is dropped."""

    documents: Sequence[TokenisedDocument]
    tokens: Tokens
    """Facts about the data row, such as remarks and unused fields; the ids and mask are not used."""
    counts: Sequence[Counts] = ()
    """Counts to add to the totals of the data, e.g. a truncation or a reason to drop the row."""


@dataclass(frozen=True)
class Tokenisation:
    """Tokenizer and settings that a process needs to turn records into documents."""

    tokenizer: PreTrainedTokenizerBase
    settings: TemplateSettings
    layout: str
    columns: dict[str, str]
    limits: LengthLimit
    kind: RowKind = DIALOGUE

    @cached_property
    def tokeniser(self) -> SampleTokeniser:
        """Tokeniser for rows of this kind; of pairs and labelled completions only the last answer is supervised."""
        is_last_only = self.kind.name in ("pairs", "marked")
        settings = replace(self.settings, train_on="last_assistant") if is_last_only else self.settings
        return SampleTokeniser(self.tokenizer, settings, bos=self.kind.bos, has_eos=self.kind.has_eos)

    def facts(self) -> dict[str, Any]:
        """Everything that decides which tokens a record gets, as JSON values; the same on every machine."""
        tokenizer = self.tokenizer
        return {
            "rules": RULES_VERSION,
            "tokenizer": tokenizer_digest(tokenizer),
            "special": [tokenizer.bos_token, tokenizer.eos_token, bool(getattr(tokenizer, "add_bos_token", False))],
            "settings": asdict(self.settings),
            "layout": [self.layout, self.columns],
            "limits": asdict(self.limits),
            "kind": self.kind.fingerprint,
        }


def divide(records: Iterable[tuple[str, ReadRecord]], most: int) -> Iterator[list[tuple[str, ReadRecord]]]:
    """Divide records into lists of at most `most` records. A list ends once its texts have `_MOST_CHARACTERS`
    characters, because a tokenizer takes about 400 bytes of memory for each.
    """
    part, size = list[tuple[str, ReadRecord]](), 0
    for where, record in records:
        part.append((where, record))
        size += _num_characters(record)
        if len(part) == most or size >= _MOST_CHARACTERS:
            yield part
            part, size = [], 0
    if part:
        yield part


def tokenise_records(records: Sequence[tuple[str, ReadRecord]], how: Tokenisation) -> tuple[Documents, Counts]:
    """Tokenise records by few calls of the tokenizer. Returns their documents, and counts of the records.

    Rows that cannot be read or tokenised are counted with their errors. If every row of a part has an error, and
    the part has the full size and at least 100 rows, a setting such as data.layout is wrong. The first error is then
    raised.
    """
    bad = dict[str, DataError]()
    rows = list[tuple[str, Record, RowSample, list[str]]]()
    made = list[MadeRow]()
    make = _MAKERS[how.kind.name]
    for part in divide(records, len(records)):
        rows_of_part = [row for each in part if (row := _read_row(*each, how, bad)) is not None]
        samples: list[tuple[str, Any]] = [(where, sample) for where, _, sample, _ in rows_of_part]
        rows += rows_of_part
        try:
            made += list(make(samples, how))
        except DataError:
            bad |= _errors_of(samples, how)
            made += make([each for each in samples if each[0] not in bad], how)
    is_full = len(records) == ROWS_PER_PART or sum(_num_characters(record) for _, record in records) >= _MOST_CHARACTERS
    if len(bad) == len(records) >= _FEWEST_BAD_ROWS and is_full:
        raise bad[records[0][0]]
    errors = [str(bad[where]) for where, _ in records if where in bad]
    good = [row for row in rows if row[0] not in bad]
    remarked = [(where, record, names, row) for (where, record, _, names), row in zip(good, made, strict=True)]
    counts = Counts(
        read=len(records),
        server_prompt_differs=sum(row.tokens.server_prompt_differs for row in made),
        bad_rows=len(errors),
        bad=tuple(errors[:BAD_ROWS_SHOWN]),
        dropped=NamedCounts.of((filter(None, [row.tokens.dropped]), where) for where, *_, row in remarked),
        noted=NamedCounts.of((_notes(each, names, row, how.tokenizer), where) for where, each, names, row in remarked),
        forms=NamedCounts.of((filter(None, [row.tokens.form]), where) for where, *_, row in remarked),
        unread=NamedCounts.of(((*columns, *row.tokens.unread), where) for where, _, columns, row in remarked),
        named=NamedCounts.of(([k for k, name in how.columns.items() if name in each], w) for w, each, *_ in remarked),
    )
    documents = Documents.of([document for row in made for document in row.documents])
    return documents, sum((change for row in made for change in row.counts), counts) + documents.counts


def _read_row(
    where: str, record: ReadRecord, how: Tokenisation, bad: dict[str, DataError]
) -> tuple[str, Record, RowSample, list[str]] | None:
    try:
        if isinstance(record, DataError):
            raise record
        sample, unread = read_row(record, how.kind, layout=how.layout, columns=how.columns, where=where)
        read = {name: value for name, value in record.items() if name not in unread}
        _check_size(read, how.limits.max_seq_len, where)
    except DataError as error:
        bad[where] = error
        return None
    return where, record, sample, unread


def _check_size(record: Record, max_seq_len: int, where: str) -> None:
    """Raise DataError where tokenising a data row would take gigabytes of memory or hours.

    A chat template is rendered three times for each answer, with all messages before it. A row that may fit into a
    document is never refused.
    """
    conversations = (value for value in record.values() if isinstance(value, list))
    messages = max((sum(isinstance(each, Mapping) for each in value) for value in conversations), default=0)
    if messages > max(_MOST_MESSAGES, max_seq_len):
        raise DataError(
            f"{where} has {messages:,} messages, and a row may have at most {max(_MOST_MESSAGES, max_seq_len):,}",
            hint="divide the conversation into several rows",
        )
    number, most = _num_characters(record), max(_MOST_CHARACTERS, _MOST_CHARACTERS_PER_TOKEN * max_seq_len)
    if number > most:
        raise DataError(
            f"{where} has {number:,} characters, and a row may have at most {most:,}",
            hint="divide its text into several rows (a .txt file is one row)",
        )


def _num_characters(record: ReadRecord) -> int:
    return sum(map(len, _texts(record)))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _errors_of(samples: Sequence[tuple[str, Any]], how: Tokenisation) -> dict[str, DataError]:
    """Search by bisection for samples that cannot be tokenised. Returns their errors by location of the data row."""
    try:
        list(_MAKERS[how.kind.name](samples, how))
    except DataError as error:
        if len(samples) == 1:
            return {samples[0][0]: error}
        middle = len(samples) // 2
        return _errors_of(samples[:middle], how) | _errors_of(samples[middle:], how)
    return {}


def _notes(record: Record, unused: Sequence[str], row: MadeRow, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    read = {name: value for name, value in record.items() if name not in unused}
    # The repr of a row has control characters escaped. Searching it first is ten times as fast as searching each text.
    suspects = [name for name, (in_repr, _) in _NOTED_CHARACTERS.items() if in_repr.search(repr(read))]
    noted = [name for name in suspects if any(map(_NOTED_CHARACTERS[name][1].search, _texts(read)))]
    # An unknown token that is also the bos, eos or padding token does not count: GPT-2's tokenizer knows all bytes.
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, None)
    unknown = tokenizer.unk_token_id
    has_unknown = unknown not in others and any(unknown in document.ids for document in row.documents)
    return [*noted, *row.tokens.notes, *["unknown"] * has_unknown]


def _make_answers(samples: Sequence[tuple[str, Sample | LabelledCompletion]], how: Tokenisation) -> Iterator[MadeRow]:
    plain = [(where, each.sample if isinstance(each, LabelledCompletion) else each) for where, each in samples]
    for (where, sample), (_, given), row in zip(plain, samples, how.tokeniser.tokenise(plain), strict=True):
        is_text = isinstance(sample, PlainText)
        if how.limits.long_rows == "split" and not is_text:
            raise DataError(
                f"{where} is dialogue, and data.long_rows split is for plain text",
                hint="set data.long_rows to auto, truncate or drop",
            )
        target = float(isinstance(given, LabelledCompletion) and given.is_good)
        yield _fit(row, how.limits.rule(is_text=is_text), how.limits.max_seq_len, target)


def _fit(row: Tokens, rule: str, size: int, target: float) -> MadeRow:
    """Make the documents of one data row. Documents of more than `size` tokens are truncated, split or dropped by
    `rule`; documents without supervised tokens are left out.
    """
    if rule == "truncate" and not row.dropped and any(row.mask[1:]) and not any(row.mask[1:size]):
        row = replace(row, dropped="no_answer_left")
    documents: list[TokenisedDocument] = []
    counts: list[Counts] = []
    for document in (*row.earlier, row):
        ids, mask, excess = document.ids, document.mask, len(document.ids) - size
        pieces = [] if document.dropped else [(ids, mask)]
        if pieces and excess > 0:
            pieces, change = _shorten(ids, mask, rule, size)
            counts.append(change)
        supervised = [TokenisedDocument(*piece, target) for piece in pieces if any(piece[1][1:])]
        if len(supervised) < len(pieces):
            counts.append(Counts(nothing_supervised=len(pieces) - len(supervised)))
        documents += supervised
    return MadeRow(documents, row, counts)


def _shorten(ids: list[int], mask: list[bool], rule: str, size: int) -> tuple[list[_Ids], Counts]:
    if rule == "drop":
        return [], Counts(too_long_dropped=1)
    if rule == "truncate":
        return [(ids[:size], mask[:size])], Counts(truncated=1, truncated_tokens=len(ids) - size)
    # Each later piece of a split document begins with the last token of the previous piece, unsupervised, so that every
    # token after the document's first is predicted exactly once.
    starts = range(0, len(ids) - 1, size - 1)
    return [(ids[at : at + size], [mask[at] and not at, *mask[at + 1 : at + size]]) for at in starts], Counts(split=1)


def _make_pairs(samples: Sequence[tuple[str, Preference]], how: Tokenisation) -> Iterator[MadeRow]:
    """Make two documents for each preference pair, the chosen one first.

    The limit applies to the sum of both lengths. A longer pair is truncated at the end of its answers, or dropped.
    """
    sides: list[tuple[str, Sample]] = []
    for where, pair in samples:
        chosen, rejected = _join_alike(pair, how.settings.separator)
        sides += [(f"{where} (chosen)", chosen), (f"{where} (rejected)", rejected)]
    tokens = how.tokeniser.tokenise(sides)
    for (_, pair), first, second in zip(samples, tokens[::2], tokens[1::2], strict=True):
        documents, dropped, counts = _fit_pair(first, second, how.limits)
        merged = replace(
            first,
            server_prompt_differs=first.server_prompt_differs or second.server_prompt_differs,
            dropped=dropped,
            notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
            unread=tuple(dict.fromkeys((*first.unread, *second.unread))),
        )
        yield MadeRow([TokenisedDocument(ids, mask, pair.margin) for ids, mask in documents], merged, counts)


def _join_alike(pair: Preference, separator: str) -> tuple[Sample, Sample]:
    chosen, rejected = pair.chosen, pair.rejected
    if not (isinstance(chosen, Completion) and isinstance(rejected, Completion)):
        return chosen, rejected
    assert chosen.prompt == rejected.prompt
    answers = [side.completion for side in (chosen, rejected) if side.completion]
    is_separated = chosen.prompt[-1:].isspace() or all(answer[:1].isspace() for answer in answers)
    prompt = chosen.prompt + ("" if is_separated else separator)
    return replace(chosen, prompt=prompt, is_joined=True), replace(rejected, prompt=prompt, is_joined=True)


def _fit_pair(chosen: Tokens, rejected: Tokens, limit: LengthLimit) -> tuple[list[_Ids], str, list[Counts]]:
    """Truncate both documents of a preference pair to the limit. Returns their ids and masks (none if the pair is
    dropped), the reason to drop it (a key of `row_report.DROPPED`, or empty), and changes of the counts.
    """
    reason = chosen.dropped or rejected.dropped
    sides = [(side.ids, side.mask) for side in (chosen, rejected)]
    if not reason and not _have_answers(sides):
        return [], "", [Counts(nothing_supervised=1)]
    if not reason and _prompt_ids(chosen) != _prompt_ids(rejected):
        reason = "prompts"
    if reason:
        return [], reason, []
    excess = len(chosen.ids) + len(rejected.ids) - limit.max_seq_len
    counts: list[Counts] = []
    if excess > 0 and limit.rule(is_text=False) == "drop":
        return [], "", [Counts(too_long_dropped=1)]
    if excess > 0:
        shorter = min(len(ids) for ids, _ in sides)
        end = max(limit.max_seq_len // 2, limit.max_seq_len - shorter)
        sides = [(ids[:end], mask[:end]) for ids, mask in sides]
        cut = len(chosen.ids) + len(rejected.ids) - sum(len(ids) for ids, _ in sides)
        counts = [Counts(truncated=1, truncated_tokens=cut)]
    if not _have_answers(sides):
        return [], "no_answer_left", []
    if sides[0][0] == sides[1][0]:
        return [], "equal_sides", []
    return sides, "", counts


def _have_answers(sides: Sequence[_Ids]) -> bool:
    return all(any(mask[1:]) for _, mask in sides)


def _prompt_ids(side: Tokens) -> list[int]:
    return side.ids[: side.mask.index(True, 1)]


def _make_labelled_texts(samples: Sequence[tuple[str, LabelledText]], how: Tokenisation) -> Iterator[MadeRow]:
    """Make one document for each text or pair of texts, with its class or number as the target; no token is supervised.

    An encoder's tokenizer gets both texts and adds its special tokens. For other models both are one text, with the
    separator between them and an EOS token at the end, also after truncation.
    """
    control = ControlTokens(how.tokenizer, None, how.settings.control_tokens)
    for where, sample in samples:
        notes = ("control_plain",) * control.check_plain((sample.text, sample.text_pair or ""), where)
        notes += ("empty_text",) * (not all(text.strip() for text in (sample.text, sample.text_pair or "x")))
        ids, second, lost = encode_labelled(sample, how.tokenizer, how.settings.separator, how.limits.max_seq_len)
        document = TokenisedDocument(ids, [False] * len(ids), sample.target, second)
        if lost and how.limits.rule(is_text=False) == "drop":
            yield MadeRow([], Tokens(notes=notes), [Counts(too_long_dropped=1)])
        else:
            changes = [Counts(truncated=1, truncated_tokens=lost)] if lost else []
            yield MadeRow([document], Tokens(notes=notes), changes)


def encode_labelled(
    sample: LabelledText, tokenizer: PreTrainedTokenizerBase, separator: str, limit: int
) -> tuple[list[int], int | None, int]:
    """Tokenise a labelled text or pair of texts. Returns at most `limit` token ids; the index of the second text's
    first id for encoders, else None; and the number of ids cut off.
    """
    texts = [sample.text] if sample.text_pair is None else [sample.text, sample.text_pair]
    if is_encoder_tokenizer(tokenizer):
        encoded = tokenizer(*texts, return_token_type_ids=True)
        lost = max(len(encoded["input_ids"]) - limit, 0)
        if lost:
            encoded = tokenizer(*texts, return_token_type_ids=True, truncation="longest_first", max_length=limit)
        types = encoded["token_type_ids"]
        return encoded["input_ids"], types.index(1) if 1 in types else None, lost
    ids, eos = list(tokenizer(separator.join(texts))["input_ids"]), int(tokenizer.eos_token_id)
    ids = ids[:-1] if ids[-1:] == [eos] else ids
    return [*ids[: limit - 1], eos], None, max(len(ids) + 1 - limit, 0)


def _make_prompts(samples: Sequence[tuple[str, Prompt]], how: Tokenisation) -> Iterator[MadeRow]:
    """Make one document for each prompt, with the columns of its data row; no token is supervised. A prompt beyond the
    limit is counted and left out, since an answer to half a question answers another question.
    """
    for (where, prompt), row in zip(samples, how.tokeniser.tokenise(samples), strict=True):
        excess = len(row.ids) - how.limits.max_seq_len
        if excess > 0 or row.dropped:
            too_long = Counts(too_long_dropped=1, long_prompts=((excess, where),))
            yield MadeRow([], row, [too_long] if excess > 0 else [])
            continue
        try:
            record = json.dumps(dict(prompt.record), default=_plain)
        except (TypeError, ValueError, RecursionError) as broken:
            raise DataError(
                f"{where}: its columns {', '.join(prompt.record)} cannot be written as JSON for the rewards: {broken}",
                hint="remove the column, or write it as text",
            ) from None
        yield MadeRow([TokenisedDocument(row.ids, [False] * len(row.ids), record=record, where=where)], row)


def _plain(value: object) -> str:
    if isinstance(value, date | datetime | time | Decimal):
        return str(value)
    raise TypeError(f"it has {type(value).__name__} {value!r:.60}")


_MAKERS: Mapping[KindName, Callable[[Sequence[tuple[str, Any]], Tokenisation], Iterator[MadeRow]]] = {
    "dialogue": _make_answers,
    "text": _make_answers,
    "pairs": _make_pairs,
    "marked": _make_answers,
    "labelled": _make_labelled_texts,
    "prompts": _make_prompts,
}
