"""Preview of the training data: samples with their supervised tokens marked, and counts of rows and tokens."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.units import share_text
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.row_report import row_notes, server_prompt_line
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.model.build.skeleton import resolve_folder
from ds_finetune.plan.settings import RunSettings
from ds_finetune.trainer.inputs import unusable_record
from ds_finetune.trainer.resolve import model_config, token_limits, with_classes

OPEN, CLOSE = "⟦", "⟧"
"""Brackets around supervised text. They are also printed where the terminal shows no colours."""


def preview_of(run: RunSettings, *, samples: int) -> RenderableType:
    """The first `samples` documents, pairs or examples of each source of the training data, and a table of read,
    dropped, truncated and split rows.
    """
    rows, tokenizer, limits = training_rows(run)
    shown = chain.from_iterable(
        _shown_source(rows, name, units[:samples], tokenizer) for name, units in rows.units_of_sources().items()
    )
    unusable = unusable_record(run.rewards, rows) if rows.kind.name == "prompts" else ""
    held_out: tuple[str, ...] = ()
    if run.data.held_out_share:
        held_out = prepare_rows(run.data, "eval", tokenizer=tokenizer, limits=limits, kind=rows.kind).notes
    notes = (*rows.notes, *held_out, *row_notes(rows.counts), *filter(None, [unusable]))
    table = Table(title="counts", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    longest = limits.max_seq_len - limits.answer_tokens
    for name, text in count_lines(rows, longest, is_packed=run.data.packing and rows.kind.name != "prompts"):
        table.add_row(name, escaped(text))
    return Group(*shown, table, *(Text(escaped(note)) for note in notes))


def training_rows(run: RunSettings) -> tuple[PreparedRows, PreTrainedTokenizerBase, TokenLimits]:
    """Training rows of a run, the tokenizer of its model, and the limits on rows."""
    run = with_classes(run, is_config_only=True)
    tokenizer = load_tokenizer(str(resolve_folder(run.model.tokenizer or run.model.path)))
    limits = token_limits(run, model_config(run))
    rows = prepare_rows(run.data, "train", tokenizer=tokenizer, limits=limits, kind=RowKind.of(run.objective))
    return rows, tokenizer, limits


def _shown_source(rows: PreparedRows, name: str, units: range, tokenizer: PreTrainedTokenizerBase) -> Iterator[Text]:
    """Documents, pairs or examples of a source of training data. In a mixture, a heading names the source."""
    if rows.mixture is not None:
        source = rows.mixture.names.index(name)
        draws, size = rows.mixture.draws[source], rows.mixture.sizes[source]
        yield Text(f"{name}: {draws:,} of {rows.rows_per_epoch:,} rows of an epoch, drawn from {size:,}", style="bold")
    for document in documents_of(rows, units):
        title = document_title(rows, document)
        if title:
            yield Text(escaped(title), style="bold")
        yield mark_supervised(*rows.document(document), tokenizer)
        if rows.kind.name == "prompts":
            record = json.dumps(rows.record(document), ensure_ascii=False)
            yield Text(escaped(f"rewards see {record}\n"))


def documents_of(rows: PreparedRows, units: range) -> range:
    """Numbers of the documents that `units` consist of; a unit is a document or a pair of two documents."""
    size = max(rows.kind.documents_per_unit, 1)
    return range(units.start * size, units.stop * size)


def document_title(rows: PreparedRows, document: int) -> str:
    """Heading of a document in the preview; empty if its text needs no heading."""
    kind, target = rows.kind, float(rows.documents.targets[document])
    if kind.name == "prompts":
        return f"prompt {document + 1}, {rows.where(document)}"
    if kind.name == "pairs":
        margin = f", margin {target:g}" if kind.has_margin and target else ""
        return f"pair {document // 2 + 1}{margin}: {'rejected' if document % 2 else 'chosen'}"
    if kind.name == "marked":
        return f"{'good' if target else 'bad'} answer"
    if kind.is_regression:
        return f"label {target:g}"
    name = f" {rows.kind.labels[int(target)]}" if rows.kind.labels else ""
    return f"class {int(target)}{name}" if kind.name == "labelled" else ""


def escaped(text: str) -> str:
    """The text with Python escapes for characters that a terminal would hide or interpret: carriage returns, tabs,
    control characters, direction marks and unusual spaces. Line feeds stay.
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def mark_supervised(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase) -> Text:
    """Text of a document, with supervised spans coloured and between OPEN and CLOSE."""
    text = Text()
    for piece, is_supervised in marked_spans(ids, mask, tokenizer):
        shown = escaped(piece)
        text.append(f"{OPEN}{shown}{CLOSE}" if is_supervised else shown, style="green" if is_supervised else "dim")
    return text.append("\n")


def marked_spans(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Texts of the spans of a document, each with whether its tokens are supervised."""
    decode, start = partial(tokenizer.decode, clean_up_tokenization_spaces=False), 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and mask[end] == mask[start]:
            continue
        # SentencePiece's decoders drop the space before the first token. So the preceding token is decoded too.
        before = ids[max(start - 1, 0) : start]
        yield decode([*before, *ids[start:end]])[len(decode(before)) :], mask[start]
        start = end


def count_lines(rows: PreparedRows, max_seq_len: int, *, is_packed: bool) -> list[tuple[str, str]]:
    """Lines (name and text) with the counts of rows, documents, labels and tokens."""
    counts = rows.counts
    has_answers = rows.kind.has_supervised_tokens
    supervised = f", {share_text(counts.supervised / max(counts.tokens, 1))} supervised" if has_answers else ""
    filled = f", {share_text(rows.fill_ratio(max_seq_len), 2)} filled" if is_packed else ", padded"
    cut = f"{counts.truncated:,} truncated, {counts.too_long_dropped:,} dropped, {counts.split:,} split"
    return [
        ("rows read", f"{counts.read:,}"),
        *([("dropped, no supervised tokens", f"{counts.nothing_supervised:,}")] if has_answers else []),
        (f"longer than {max_seq_len}", cut),
        ("tokens lost to truncation", f"{counts.truncated_tokens:,} ({share_text(counts.truncated_ratio, 2)})"),
        *([("prompts", server_prompt_line(counts))] if has_answers else []),
        (rows.kind.unit, f"{rows.num_units:,}"),
        *rows.label_lines(),
        ("tokens", f"{counts.tokens:,}{supervised}"),
        ("packed rows" if is_packed else "training rows", f"{len(rows):,}{filled}"),
    ]
