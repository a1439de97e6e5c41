"""Refuses data of which too much would not be trained, or in which no row has a column that the run file names."""

from collections.abc import Sequence

from ds_finetune.config.sections import DataConfig
from ds_finetune.config.units import share_text
from ds_finetune.data.documents import Counts
from ds_finetune.data.row_report import bad_row_lines, dropped_row_lines, dropped_rows_hint
from ds_finetune.data.sources import Source
from ds_finetune.errors import DataError


def check_bad_rows(counts: Counts, config: DataConfig) -> None:
    """DataError that lists the rows that cannot be read or tokenised, unless data.bad_rows is drop."""
    if config.bad_rows == "drop" or not counts.bad_rows:
        return
    message, _, hint = counts.bad[0].partition("\n  hint: ")
    if counts.bad_rows > 1:
        message = "\n  ".join([f"{counts.bad_rows:,} of {counts.read:,} rows are bad:", *bad_row_lines(counts)])
        hint = f"{hint}; or set data.bad_rows: drop"
    raise DataError(f"{message}", hint=hint)


def check_dropped_rows(counts: Counts, config: DataConfig, sources: Sequence[Source]) -> None:
    """DataError where too many rows are dropped or too many tokens are cut off, or where no row is left."""
    check_bad_rows(counts, config)
    names = ", ".join(source.path for source in sources)
    dropped = counts.nothing_supervised + counts.too_long_dropped + counts.dropped.rows + counts.bad_rows
    reason = ", ".join(dropped_row_lines(counts))
    if not counts.documents:
        raise DataError(f"none of the {counts.read} rows of {names} is left ({reason})", hint=dropped_rows_hint(counts))
    if dropped > config.max_dropped_ratio * counts.read:
        raise DataError(
            f"{dropped} of {counts.read} rows of {names} are dropped ({reason}), more than data.max_dropped_ratio "
            f"{config.max_dropped_ratio:g}",
            hint=dropped_rows_hint(counts),
        )
    if counts.truncated_ratio > config.max_truncated_ratio:
        raise DataError(
            f"{counts.truncated} of {counts.read} rows of {names} are longer than train.max_seq_len, and truncation "
            f"cuts off {share_text(counts.truncated_ratio)} of all tokens, more than data.max_truncated_ratio "
            f"{config.max_truncated_ratio:g}",
            hint="raise train.max_seq_len, set data.long_rows to drop (or split, for plain text), or raise the ratio",
        )


def check_columns(counts: Counts, config: DataConfig) -> None:
    """DataError where no row has a column that `data.columns` names."""
    unused = [f"{key}: {column}" for key, column in config.columns.items() if key not in counts.named.entries]
    if unused:
        raise DataError(
            f"data.columns {{{', '.join(unused)}}} has no effect: none of the {counts.read} rows has such a column",
            hint=f"correct the name, or remove the entry; unread columns: {', '.join(counts.unread.entries) or 'none'}",
        )
