"""Preview of the training data: samples with their supervised tokens marked, and counts of rows and tokens."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.schema import RunConfig
from ds_finetune.data.prepare import prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.row_report import row_notes, server_prompt_line
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.model.build import resolve_folder
from ds_finetune.trainer.inputs import model_config, token_limits

OPEN, CLOSE = "⟦", "⟧"
"""Put around supervised text, also where there are no colours."""


def preview_of(config: RunConfig, *, samples: int) -> RenderableType:
    """The first `samples` documents of the training data and a table of how many rows were read, dropped, truncated
    and split.
    """
    tokenizer = load_tokenizer(str(resolve_folder(config.model.tokenizer or config.model.path)))
    limits = token_limits(config, model_config(config))
    rows = prepare_rows(config.data, "train", tokenizer=tokenizer, limits=limits, kind=RowKind.of(config.objective))
    number = min(samples, rows.counts.documents)
    shown = [mark_supervised(*rows.document(index), tokenizer) for index in range(number)]
    notes = (*rows.notes, *row_notes(rows.counts))
    return Group(*shown, counts_table(rows, config), *(Text(note) for note in notes))


def mark_supervised(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase) -> Text:
    """A document as text, supervised text between OPEN and CLOSE and in colour."""
    text = Text()
    start = 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and mask[end] == mask[start]:
            continue
        piece = tokenizer.decode(ids[start:end])
        text.append(f"{OPEN}{piece}{CLOSE}" if mask[start] else piece, style="green" if mask[start] else "dim")
        start = end
    return text.append("\n")


def counts_table(rows: PreparedRows, config: RunConfig) -> Table:
    """A table of how many rows were read, dropped, truncated and split, and of documents and tokens."""
    table = Table(title="counts", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    counts = rows.counts
    lines = [
        ("rows read", f"{counts.read:,}"),
        ("dropped, no supervised tokens", f"{counts.nothing_supervised:,}"),
        (
            f"longer than {config.train.max_seq_len}",
            f"{counts.truncated:,} truncated, {counts.too_long_dropped:,} dropped, {counts.split:,} split",
        ),
        ("tokens lost to truncation", f"{counts.truncated_tokens:,} ({counts.truncated_ratio:.2%})"),
        ("prompts", server_prompt_line(counts)),
        ("documents", f"{counts.documents:,}"),
        ("tokens", f"{counts.tokens:,}, {counts.supervised / max(counts.tokens, 1):.1%} supervised"),
        (
            "training rows",
            f"{len(rows):,}"
            + (f", {rows.fill_ratio(config.train.max_seq_len):.2%} filled" if config.data.packing else ", padded"),
        ),
    ]
    for name, text in lines:
        table.add_row(name, text)
    return table
