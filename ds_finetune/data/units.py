"""Makes documents of the samples of objectives whose loss is not a sum over tokens: pairs, marked answers, and texts
with labels.

Each row becomes one unit, or is dropped. Dropped rows are counted by their reason.
"""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from ds_finetune.data.control_tokens import ControlTokens
from ds_finetune.data.documents import Counts, Documents, KeptDocument, LengthLimit
from ds_finetune.data.labelled import LabelledText, MarkedAnswer
from ds_finetune.data.layouts import Completion, Sample
from ds_finetune.data.preferences import Preference
from ds_finetune.data.sample_tokens import SampleTokeniser, TemplateSettings, Tokens
from ds_finetune.data.tokenizer_files import is_encoder_tokenizer
from ds_finetune.errors import DataError

Made = tuple[Documents, Counts, Sequence[Tokens]]
"""Documents, the counts of their rows, and for each row its remarks: `Tokens` of which ids and mask are not read."""


def make_pairs(
    samples: Sequence[tuple[str, Preference]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    settings: TemplateSettings,
    limit: LengthLimit,
) -> Made:
    """Two documents for each pair, the chosen one first; only the last answer of each carries loss.

    `limit` bounds both together. A pair that is longer is cut at the end of its answers, or dropped.
    """
    sides: list[tuple[str, Sample]] = []
    for where, pair in samples:
        chosen, rejected = _join_alike(pair, settings.separator)
        sides += [(f"{where} (chosen)", chosen), (f"{where} (rejected)", rejected)]
    tokens = SampleTokeniser(tokenizer, replace(settings, train_on="last_assistant")).tokenise(sides)
    kept: list[KeptDocument] = []
    remarks: list[Tokens] = []
    counts = Counts(read=len(samples))
    for (_, pair), chosen_tokens, rejected_tokens in zip(samples, tokens[::2], tokens[1::2], strict=True):
        unit, dropped, change = _fit_pair(chosen_tokens, rejected_tokens, limit)
        kept += [KeptDocument(ids, mask, pair.margin) for ids, mask in unit]
        merged = _merge_remarks(chosen_tokens, rejected_tokens, dropped)
        remarks.append(merged)
        counts += change + Counts(server_prompt_differs=int(merged.server_prompt_differs))
    documents = Documents.of(kept)
    return documents, counts + documents.counts, remarks


def _join_alike(pair: Preference, separator: str) -> tuple[Sample, Sample]:
    """Both sides with the separator after the prompt that plain text needs, so that their prompts are the same."""
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
    """The sides of a pair as they are kept, or none and the reason, a key of `row_report.DROPPED`."""
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
    """Whether each side has a token that carries loss; the first of a document never does."""
    return all(any(mask[1:]) for _, mask in sides)


def _prompt_ids(side: Tokens) -> list[int]:
    return side.ids[: side.mask.index(True, 1)]


def _merge_remarks(chosen: Tokens, rejected: Tokens, dropped: str) -> Tokens:
    return Tokens(
        [],
        [],
        server_prompt_differs=chosen.server_prompt_differs or rejected.server_prompt_differs,
        dropped=dropped,
        notes=tuple(dict.fromkeys((*chosen.notes, *rejected.notes))),
        unread=tuple(dict.fromkeys((*chosen.unread, *rejected.unread))),
    )


def make_marked_answers(
    samples: Sequence[tuple[str, MarkedAnswer]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    settings: TemplateSettings,
    limit: LengthLimit,
) -> Made:
    """One document for each answer, with the target 1 if it is good and 0 if bad; only the last answer carries loss."""
    tokeniser = SampleTokeniser(tokenizer, replace(settings, train_on="last_assistant"))
    tokens = tokeniser.tokenise([(where, marked.sample) for where, marked in samples])
    kept: list[KeptDocument] = []
    remarks: list[Tokens] = []
    counts = Counts(read=len(samples))
    for (_, marked), document in zip(samples, tokens, strict=True):
        ids, mask = document.ids[: limit.max_seq_len], document.mask[: limit.max_seq_len]
        lost = len(document.ids) - len(ids)
        reason = document.dropped
        if not reason and not any(document.mask[1:]):
            counts += Counts(nothing_supervised=1)
        elif not reason and lost and limit.rule(is_text=False) == "drop":
            counts += Counts(too_long_dropped=1)
        elif not reason and not any(mask[1:]):
            reason = "no_answer_left"
        elif not reason:
            kept.append(KeptDocument(ids, mask, float(marked.is_good)))
            counts += Counts(truncated=int(lost > 0), truncated_tokens=lost)
        remarks.append(replace(document, dropped=reason))
    counts += Counts(server_prompt_differs=sum(document.server_prompt_differs for document in tokens))
    documents = Documents.of(kept)
    return documents, counts + documents.counts, remarks


def make_labelled_texts(
    samples: Sequence[tuple[str, LabelledText]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    settings: TemplateSettings,
    limit: LengthLimit,
) -> Made:
    """One document for each text or pair of texts, with its class or number as the target; no token carries loss.

    An encoder's tokenizer gets both texts, and writes its own special tokens. For other models both are one text,
    with the separator between them and an EOS token at the end, also where the text is cut.
    """
    control = ControlTokens(tokenizer, None, settings.control_tokens)
    kept: list[KeptDocument] = []
    remarks: list[Tokens] = []
    counts = Counts(read=len(samples))
    for where, sample in samples:
        remarks.append(Tokens([], [], notes=_control_notes(sample, control, settings.control_tokens, where)))
        ids, second, lost = encode_labelled(sample, tokenizer, settings.separator, limit.max_seq_len)
        if lost and limit.rule(is_text=False) == "drop":
            counts += Counts(too_long_dropped=1)
            continue
        kept.append(KeptDocument(ids, [False] * len(ids), sample.target, second))
        counts += Counts(truncated=int(lost > 0), truncated_tokens=lost)
    documents = Documents.of(kept)
    return documents, counts + documents.counts, remarks


def encode_labelled(
    sample: LabelledText, tokenizer: PreTrainedTokenizerBase, separator: str, limit: int
) -> tuple[list[int], int | None, int]:
    """At most `limit` ids, the first token of type 1 (None if there is none), and the number of tokens cut off."""
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
        # The call has changed the tokenizer, of which the cache has a fingerprint.
        tokenizer.backend_tokenizer.no_truncation()
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
