"""Makes documents from records: reads each as a sample of the objective, tokenises it, and fits it to the limit.

Where the loss is not a sum over tokens, a row becomes one unit: two documents of a pair, or one of a labelled
completion, a labelled text or a prompt. Dropped rows are counted by their reason.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from transformers import PreTrainedTokenizerBase

from ds_finetune.config.objectives import KindName
from ds_finetune.data.documents import (
    BAD_ROWS_SHOWN,
    Counts,
    Documents,
    KeptDocument,
    LengthLimit,
    NamedCounts,
    make_documents,
)
from ds_finetune.data.files import ReadRecord, Record
from ds_finetune.data.preferences import Preference
from ds_finetune.data.prompts import Prompt
from ds_finetune.data.record_layouts import Completion, LabelledText, MarkedAnswer, PlainText, Sample
from ds_finetune.data.row_kind import DIALOGUE, RowKind
from ds_finetune.data.sample_tokens import SampleTokeniser, TemplateSettings, Tokens
from ds_finetune.data.samples import RowSample, read_row
from ds_finetune.data.text_encoder import ControlTokens
from ds_finetune.data.tokenizer_files import is_encoder_tokenizer
from ds_finetune.errors import DataError

_MOST_CHARACTERS, _MOST_CHARACTERS_PER_TOKEN = 4_000_000, 8
ROWS_PER_PART = 2000
_NOTED_CHARACTERS = {
    "windows_lines": (re.compile(r"\\r\\n"), re.compile("\r\n")),
    "conversion": (
        re.compile(r"\\x[0189]|\\x7f|\\ufe?ff|\\ufffe|\ufffd"),
        re.compile("[\0-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufffd-\uffff]"),
    ),
}
"""For each remark on characters (`row_report.NOTED`): how they appear in a repr, and in a text."""
Made = tuple[Documents, Counts, Sequence[Tokens]]
"""Documents, counts of their rows, and for each row a `Tokens` with its remarks, whose ids and mask are not used."""


@dataclass(frozen=True)
class Tokenisation:
    """Tokenizer and settings that a process needs to turn records into documents."""

    tokenizer: PreTrainedTokenizerBase
    settings: TemplateSettings
    layout: str
    columns: dict[str, str]
    limits: LengthLimit
    kind: RowKind = DIALOGUE


def tokenise_records(records: Sequence[tuple[str, ReadRecord]], how: Tokenisation) -> tuple[Documents, Counts]:
    """Documents from records, by one call of the tokenizer, and the counts of the records.

    Rows that cannot be read or tokenised are counted with their errors. DataError where there are at least
    `ROWS_PER_PART` bad rows, which are then all rows of a part, as with a wrong data.layout.
    """
    bad = dict[str, DataError]()
    rows = [row for where, record in records if (row := _read_row(where, record, how, bad)) is not None]
    samples: list[tuple[str, Any]] = [(where, sample) for where, sample, _ in rows]
    make = _MAKERS[how.kind.name]
    try:
        documents, counts, remarks = make(samples, how)
    except DataError:
        bad |= _errors_of(samples, how)
        documents, counts, remarks = make([each for each in samples if each[0] not in bad], how)
    if len(bad) >= ROWS_PER_PART:
        raise bad[records[0][0]]
    errors = [str(bad[where]) for where, _ in records if where in bad]
    good = [(where, record) for where, record in records if not isinstance(record, DataError) and where not in bad]
    unread = [names for where, _, names in rows if where not in bad]
    remarked = list(zip(good, remarks, unread, strict=True))
    return documents, counts + Counts(
        read=len(errors),
        bad_rows=len(errors),
        bad=tuple(errors[:BAD_ROWS_SHOWN]),
        dropped=NamedCounts.of(([row.dropped] * bool(row.dropped), where) for (where, _), row, _ in remarked),
        noted=NamedCounts.of((_notes(record, columns, row), where) for (where, record), row, columns in remarked),
        forms=NamedCounts.of(([row.form] * bool(row.form), where) for (where, _), row, _ in remarked),
        unread=NamedCounts.of(((*columns, *row.unread), where) for (where, _), row, columns in remarked),
        named=NamedCounts.of(([k for k, column in how.columns.items() if column in each], w) for w, each in good),
    )


def _read_row(
    where: str, record: ReadRecord, how: Tokenisation, bad: dict[str, DataError]
) -> tuple[str, RowSample, list[str]] | None:
    """Location, sample and unused columns of a record; None for a bad one, whose error is added to `bad`."""
    try:
        if isinstance(record, DataError):
            raise record
        sample, unread = read_row(record, how.kind, layout=how.layout, columns=how.columns, where=where)
        read = {name: value for name, value in record.items() if name not in unread}
        _check_characters(read, how.limits.max_seq_len, where)
    except DataError as error:
        bad[where] = error
        return None
    return where, sample, unread


def _check_characters(record: Record, max_seq_len: int, where: str) -> None:
    """DataError where a row has so many characters that tokenising it would take gigabytes of memory.

    A tokenizer takes about 400 bytes per character. A row that may fit into a document is never refused.
    """
    number, most = sum(map(len, _texts(record))), max(_MOST_CHARACTERS, _MOST_CHARACTERS_PER_TOKEN * max_seq_len)
    if number > most:
        raise DataError(
            f"{where} has {number:,} characters, and a row may have {most:,}",
            hint="divide its text into several rows (a .txt file is one row)",
        )


def _texts(value: object) -> Iterator[str]:
    """All texts in `value`, a record or a part of one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _errors_of(samples: Sequence[tuple[str, Any]], how: Tokenisation) -> dict[str, DataError]:
    """Errors of samples that cannot be tokenised, by location, found by bisection."""
    try:
        if samples:
            _MAKERS[how.kind.name](samples, how)
    except DataError as error:
        if len(samples) == 1:
            return {samples[0][0]: error}
        middle = len(samples) // 2
        return _errors_of(samples[:middle], how) | _errors_of(samples[middle:], how)
    return {}


def _notes(record: Record, unused: Sequence[str], row: Tokens) -> tuple[str, ...]:
    read = {name: value for name, value in record.items() if name not in unused}
    # The repr escapes control characters; searching it first is ten times as fast as searching each text.
    suspects = [name for name, (in_repr, _) in _NOTED_CHARACTERS.items() if in_repr.search(repr(read))]
    noted = [name for name in suspects if any(map(_NOTED_CHARACTERS[name][1].search, _texts(read)))]
    return (*noted, *row.notes)


def _make_token_documents(samples: Sequence[tuple[str, Sample]], how: Tokenisation) -> Made:
    tokeniser = SampleTokeniser(how.tokenizer, how.settings, bos=how.kind.bos, has_eos=how.kind.has_eos)
    rules = [_rule(*sample, how.limits) for sample in samples]
    most = how.limits.max_seq_len
    tokens = [
        replace(row, dropped="no_answer_left") if rule == "truncate" and row.loses_answers(most) else row
        for row, rule in zip(tokeniser.tokenise(samples), rules, strict=True)
    ]
    documents, counts = make_documents(tokens, rules, max_seq_len=most)
    return documents, counts, tokens


def _rule(where: str, sample: Sample, limits: LengthLimit) -> str:
    is_text = isinstance(sample, PlainText)
    if limits.long_rows == "split" and not is_text:
        raise DataError(
            f"{where} is dialogue, and data.long_rows split is for plain text",
            hint="set data.long_rows to auto, truncate or drop",
        )
    return limits.rule(is_text=is_text)


def _make_pairs(samples: Sequence[tuple[str, Preference]], how: Tokenisation) -> Made:
    """Two documents for each pair, the chosen one first; only the last answer of each is supervised.

    The limit applies to both documents together. A longer pair is truncated at the end of its answers, or dropped.
    """
    sides: list[tuple[str, Sample]] = []
    for where, pair in samples:
        chosen, rejected = _join_alike(pair, how.settings.separator)
        sides += [(f"{where} (chosen)", chosen), (f"{where} (rejected)", rejected)]
    tokens = _tokenise_last_answers(sides, how)
    kept: list[KeptDocument] = []
    remarks: list[Tokens] = []
    counts = Counts(read=len(samples))
    for (_, pair), chosen_tokens, rejected_tokens in zip(samples, tokens[::2], tokens[1::2], strict=True):
        unit, dropped, change = _fit_pair(chosen_tokens, rejected_tokens, how.limits)
        kept += [KeptDocument(ids, mask, pair.margin) for ids, mask in unit]
        merged = Tokens(
            [],
            [],
            server_prompt_differs=chosen_tokens.server_prompt_differs or rejected_tokens.server_prompt_differs,
            dropped=dropped,
            notes=tuple(dict.fromkeys((*chosen_tokens.notes, *rejected_tokens.notes))),
            unread=tuple(dict.fromkeys((*chosen_tokens.unread, *rejected_tokens.unread))),
            form=chosen_tokens.form,
        )
        remarks.append(merged)
        counts += change + Counts(server_prompt_differs=int(merged.server_prompt_differs))
    documents = Documents.of(kept)
    return documents, counts + documents.counts, remarks


def _tokenise_last_answers(samples: Sequence[tuple[str, Sample]], how: Tokenisation) -> list[Tokens]:
    return SampleTokeniser(how.tokenizer, replace(how.settings, train_on="last_assistant")).tokenise(samples)


def _join_alike(pair: Preference, separator: str) -> tuple[Sample, Sample]:
    """Both sides with the same prompt text, including the separator before the answers where plain text needs one."""
    chosen, rejected = pair.chosen, pair.rejected
    if not (isinstance(chosen, Completion) and isinstance(rejected, Completion)):
        return chosen, rejected
    assert chosen.prompt == rejected.prompt
    answers = [side.completion for side in (chosen, rejected) if side.completion]
    is_apart = chosen.prompt[-1:].isspace() or all(answer[:1].isspace() for answer in answers)
    prompt = chosen.prompt + ("" if is_apart else separator)
    return replace(chosen, prompt=prompt, is_joined=True), replace(rejected, prompt=prompt, is_joined=True)


_Ids = tuple[list[int], list[bool]]


def _fit_pair(chosen: Tokens, rejected: Tokens, limit: LengthLimit) -> tuple[list[_Ids], str, Counts]:
    """Ids and masks of both sides after truncation, or none and why, a key of `row_report.DROPPED`."""
    reason = chosen.dropped or rejected.dropped
    sides = [(side.ids, side.mask) for side in (chosen, rejected)]
    if not reason and not _have_answers(sides):
        return [], "", Counts(nothing_supervised=1)
    if not reason and _prompt_ids(chosen) != _prompt_ids(rejected):
        reason = "prompts"
    if reason:
        return [], reason, Counts()
    excess = max(len(chosen.ids) + len(rejected.ids) - limit.max_seq_len, 0)
    if excess and limit.rule(is_text=False) == "drop":
        return [], "", Counts(too_long_dropped=1)
    if excess:
        shorter = min(len(ids) for ids, _ in sides)
        end = max(limit.max_seq_len // 2, limit.max_seq_len - shorter)
        sides = [(ids[:end], mask[:end]) for ids, mask in sides]
    if not _have_answers(sides):
        return [], "no_answer_left", Counts()
    if sides[0][0] == sides[1][0]:
        return [], "equal_sides", Counts()
    cut = len(chosen.ids) + len(rejected.ids) - sum(len(ids) for ids, _ in sides)
    return sides, "", Counts(truncated=int(cut > 0), truncated_tokens=cut)


def _have_answers(sides: Sequence[_Ids]) -> bool:
    """Whether each side has a supervised token; the first token of a document never is."""
    return all(any(mask[1:]) for _, mask in sides)


def _prompt_ids(side: Tokens) -> list[int]:
    return side.ids[: side.mask.index(True, 1)]


def _make_labelled_completions(samples: Sequence[tuple[str, MarkedAnswer]], how: Tokenisation) -> Made:
    """One document for each answer, with target 1 for good and 0 for bad; only the last answer is supervised."""
    tokens = _tokenise_last_answers([(where, marked.sample) for where, marked in samples], how)
    kept: list[KeptDocument] = []
    remarks: list[Tokens] = []
    counts = Counts(read=len(samples), server_prompt_differs=sum(row.server_prompt_differs for row in tokens))
    for (_, marked), row in zip(samples, tokens, strict=True):
        unit, dropped, change = _fit_answer(row, how.limits)
        kept += [KeptDocument(ids, mask, float(marked.is_good)) for ids, mask in unit]
        remarks.append(replace(row, dropped=dropped))
        counts += change
    documents = Documents.of(kept)
    return documents, counts + documents.counts, remarks


def _fit_answer(row: Tokens, limit: LengthLimit) -> tuple[list[_Ids], str, Counts]:
    """Ids and mask after truncation, or none and why, a key of `row_report.DROPPED`."""
    if row.dropped:
        return [], row.dropped, Counts()
    if not any(row.mask[1:]):
        return [], "", Counts(nothing_supervised=1)
    ids, mask = row.ids[: limit.max_seq_len], row.mask[: limit.max_seq_len]
    lost = len(row.ids) - len(ids)
    if lost and limit.rule(is_text=False) == "drop":
        return [], "", Counts(too_long_dropped=1)
    if not any(mask[1:]):
        return [], "no_answer_left", Counts()
    return [(ids, mask)], "", Counts(truncated=int(lost > 0), truncated_tokens=lost)


def _make_labelled_texts(samples: Sequence[tuple[str, LabelledText]], how: Tokenisation) -> Made:
    """One document for each text or pair of texts, with its class or number as the target; no token is supervised.

    An encoder's tokenizer gets both texts and adds its special tokens. For other models both are one text, with the
    separator between them and an EOS token at the end, also after truncation.
    """
    control = ControlTokens(how.tokenizer, None, how.settings.control_tokens)
    kept: list[KeptDocument] = []
    remarks: list[Tokens] = []
    counts = Counts(read=len(samples))
    for where, sample in samples:
        notes = _control_notes(sample, control, how.settings.control_tokens, where)
        notes += ("empty_text",) * (not all(text.strip() for text in (sample.text, sample.text_pair or "x")))
        remarks.append(Tokens([], [], notes=notes))
        ids, second, lost = encode_labelled(sample, how.tokenizer, how.settings.separator, how.limits.max_seq_len)
        if lost and how.limits.rule(is_text=False) == "drop":
            counts += Counts(too_long_dropped=1)
            continue
        kept.append(KeptDocument(ids, [False] * len(ids), sample.target, second))
        counts += Counts(truncated=int(lost > 0), truncated_tokens=lost)
    documents = Documents.of(kept)
    return documents, counts + documents.counts, remarks


def encode_labelled(
    sample: LabelledText, tokenizer: PreTrainedTokenizerBase, separator: str, limit: int
) -> tuple[list[int], int | None, int]:
    """At most `limit` ids, the index of the first id of type 1 (None without any), and the number of ids cut off."""
    encode = _encode_for_encoder if is_encoder_tokenizer(tokenizer) else _encode_for_decoder
    return encode(sample, tokenizer, separator, limit)


def _control_notes(sample: LabelledText, control: ControlTokens, choice: str, where: str) -> tuple[str, ...]:
    if not any(control.has_control_token(text) for text in (sample.text, sample.text_pair or "")):
        return ()
    if choice == "refuse":
        raise DataError(
            f"{where}: a text contains a control token of the tokenizer: {sample.text!r:.60}",
            hint="set data.control_tokens to keep",
        )
    return ("control_plain",)


def _encode_for_encoder(
    sample: LabelledText, tokenizer: PreTrainedTokenizerBase, separator: str, limit: int
) -> tuple[list[int], int | None, int]:
    texts = [sample.text] if sample.text_pair is None else [sample.text, sample.text_pair]
    encoded = tokenizer(*texts, return_token_type_ids=True)
    lost = max(len(encoded["input_ids"]) - limit, 0)
    if lost:
        encoded = tokenizer(*texts, return_token_type_ids=True, truncation="longest_first", max_length=limit)
    types = encoded["token_type_ids"]
    return encoded["input_ids"], types.index(1) if 1 in types else None, lost


def _encode_for_decoder(
    sample: LabelledText, tokenizer: PreTrainedTokenizerBase, separator: str, limit: int
) -> tuple[list[int], int | None, int]:
    text = sample.text if sample.text_pair is None else sample.text + separator + sample.text_pair
    ids = list(tokenizer(text)["input_ids"])
    eos = int(tokenizer.eos_token_id)
    ids = ids[:-1] if ids[-1:] == [eos] else ids
    return [*ids[: limit - 1], eos], None, max(len(ids) + 1 - limit, 0)


def _make_prompts(samples: Sequence[tuple[str, Prompt]], how: Tokenisation) -> Made:
    """One document for each prompt, with its record; no token is supervised. A longer prompt is counted and left out: a
    part of a question has another answer.
    """
    tokens = SampleTokeniser(how.tokenizer, how.settings).tokenise(samples)
    kept: list[KeptDocument] = []
    long: list[tuple[int, str]] = []
    for (where, prompt), row in zip(samples, tokens, strict=True):
        excess = len(row.ids) - how.limits.max_seq_len
        if excess > 0:
            long.append((excess, where))
        elif not row.dropped:
            kept.append(_prompt_document(row.ids, prompt, where))
    documents = Documents.of(kept)
    counts = Counts(read=len(samples), too_long_dropped=len(long), long_prompts=tuple(long))
    return documents, counts + documents.counts, tokens


def _prompt_document(ids: list[int], prompt: Prompt, where: str) -> KeptDocument:
    try:
        record = json.dumps(dict(prompt.record), default=_plain)
    except (TypeError, ValueError, RecursionError) as broken:
        raise DataError(
            f"{where}: its columns {', '.join(prompt.record)} cannot be written as JSON for the rewards: {broken}",
            hint="remove the column, or write it as text",
        ) from None
    return KeptDocument(ids, [False] * len(ids), record=record, where=where)


def _plain(value: object) -> str:
    """Convert Parquet's dates and decimal numbers to texts."""
    if isinstance(value, date | datetime | time | Decimal):
        return str(value)
    raise TypeError(f"it has {type(value).__name__} {value!r:.60}")


_MAKERS: Mapping[KindName, Callable[[Sequence[tuple[str, Any]], Tokenisation], Made]] = {
    "dialogue": _make_token_documents,
    "text": _make_token_documents,
    "pairs": _make_pairs,
    "marked": _make_labelled_completions,
    "labelled": _make_labelled_texts,
    "prompts": _make_prompts,
}
