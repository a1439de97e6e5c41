"""Reports on data rows as lines of text: how many were dropped and why, and remarks on the others.

Data is refused if too much of it would not be trained, or if no row has a column that the run file names.
"""

import re
from collections.abc import Iterator, Sequence
from operator import itemgetter

from ds_finetune.config.sections import DataConfig
from ds_finetune.config.units import share_text
from ds_finetune.data.documents import BAD_ROWS_SHOWN, Counts
from ds_finetune.data.sources import Source
from ds_finetune.errors import DataError

DROPPED = {
    "text": (
        "with a text that the chat template does not render",
        "give a data.template that renders each message once",
    ),
    "plain": (
        "with a system text or history, which a prompt without a chat template cannot contain",
        "set data.template to a name such as chatml, or to a Jinja file",
    ),
    "calls": (
        "with tool calls that the chat template does not render",
        "give a data.template that renders text and tool calls",
    ),
    "reasoning": (
        "with reasoning that the chat template does not render",
        "set data.reasoning: strip, or give a data.template that renders reasoning_content",
    ),
    "equal_sides": ("whose chosen and rejected answers have the same tokens", "remove such rows: they teach nothing"),
    "no_answer_left": (
        "whose prompt leaves no room for an answer",
        "raise train.max_seq_len, which bounds a row, and both sides of a pair together",
    ),
    "prompts": (
        "whose answers the chat template opens differently, so that their prompts differ",
        "set data.reasoning: strip, or give a data.template that opens both answers alike",
    ),
}
"""Reasons to drop a data row, each with the predicate of a sentence about such rows, and a hint."""
NOTED = {
    "tools": "name tools that the prompt does not contain, so the model does not see them",
    "tools_partly": "name tools of which the chat template renders only a part",
    "as_answer": (
        "have system or tool messages that the chat template writes like answers of the assistant, so the model takes "
        "them for its own words"
    ),
    "open_call": (
        "have a tool call that the chat template does not end as it ends other turns: the model stops after it only "
        "if generation_config.json has the token that ends the call as an eos_token_id"
    ),
    "empty_answer": "have an empty answer, of which only the end token is trained",
    "empty_text": "have an empty text, which is trained as one of its class",
    "joined": (
        "have an answer whose first characters the tokenizer would join with the end of the prompt in one token: the "
        "prompt is tokenised as a server does it, and the answer begins with a token of its own"
    ),
    "behind": "end with messages after the last answer, which are left out",
    "rewritten": (
        "have several answers that the chat template writes in another way once a turn follows: each is trained in a "
        "document of its own, with the turns before it as a server sends them"
    ),
    "control_text": "contain control tokens, which are tokenised as text (data.control_tokens text)",
    "control_keep": "contain control tokens, which stay control tokens (data.control_tokens keep)",
    "windows_lines": "have Windows line ends (a carriage return before the line feed) in a text, which are trained as "
    "they are",
    "conversion": "have characters that a wrong conversion of the encoding leaves (U+FEFF, U+FFFD, NUL or another "
    "control character) in a text, which are trained as they are",
    "unknown": "have characters or words that the tokenizer does not know: its unknown token is trained in their place",
    "control_plain": "contain control tokens, which stay control tokens because no chat template is used",
}
"""Remarks on trained data rows by key. Each is the predicate of a sentence, as in "[rows] have an empty answer"."""


def bad_row_lines(counts: Counts) -> list[str]:
    """Error messages of the first unreadable data rows, one for each cause, and the number of further ones."""
    causes: dict[str, list[str]] = {}
    shown = [error.partition("\n  hint: ")[0] for error in counts.bad[:BAD_ROWS_SHOWN]]
    for line in shown:
        causes.setdefault(re.sub(r" (line|row|column) \d+", "", line), []).append(line)
    lines = [first + f" (and {len(others)} rows like it)" * bool(others) for first, *others in causes.values()]
    return lines + [f"and {counts.bad_rows - len(shown):,} more"] * (counts.bad_rows > len(shown))


def dropped_rows_hint(counts: Counts) -> str:
    """Hint for the reason for which most rows were dropped."""
    entries = counts.dropped.entries
    raised = ", or raise data.max_dropped_ratio" if counts.documents else ""
    if counts.bad_rows * 2 > counts.read - counts.documents:
        return f"correct the bad rows, which data.bad_rows error lists{raised}"
    worst = max(entries, key=lambda name: entries[name][0], default=None)
    if worst is None or entries[worst][0] < counts.nothing_supervised + counts.too_long_dropped:
        if counts.long_prompts:
            return f"raise train.max_seq_len, lower rollout.max_new_tokens{raised}"
        if counts.too_long_dropped > counts.nothing_supervised:
            return f"raise train.max_seq_len, set data.long_rows: truncate{raised}"
        return "check that rows have texts and answers, data.columns, data.train_on and the template"
    return f"{DROPPED[worst][1]} (the first such row is {entries[worst][1]})"


def row_notes(counts: Counts) -> Iterator[str]:
    """Lines about dropped data rows, remarks and unused columns, shown to the user before training."""
    if counts.bad_rows:
        yield f"{counts.bad_rows:,} of {counts.read:,} rows are dropped as bad (data.bad_rows drop)"
        yield from bad_row_lines(counts)
    for name, (rows, first) in counts.dropped.entries.items():
        yield f"{rows:,} of {counts.read:,} rows are dropped: rows {DROPPED[name][0]}; the first is {first}"
    for name, (rows, first) in counts.noted.entries.items():
        yield f"{rows:,} of {counts.read:,} rows {NOTED[name]}; the first is {first}"
    if counts.unread.entries:
        names = ", ".join(f"{name} ({rows:,} rows)" for name, (rows, _) in counts.unread.entries.items())
        yield f"columns and fields that are not used: {names}"


def server_prompt_line(counts: Counts) -> str:
    """Line with the number of data rows whose prompt differs from that of a server.

    A server calls `apply_chat_template` with the messages before the answer.
    """
    rows = counts.server_prompt_differs
    fraction = rows / max(counts.read, 1)
    return f"{rows:,} of {counts.read:,} rows ({share_text(fraction)}) have a prompt that differs from a server's"


def check_bad_rows(counts: Counts, config: DataConfig) -> None:
    """Raise DataError with the data rows that cannot be read or tokenised, unless data.bad_rows is drop."""
    if config.bad_rows == "drop" or not counts.bad_rows:
        return
    errors, _, hint = counts.bad[0].partition("\n  hint: ")
    if counts.bad_rows > 1:
        errors = "\n  ".join([f"{counts.bad_rows:,} of {counts.read:,} rows are bad:", *bad_row_lines(counts)])
        may_drop = counts.bad_rows < counts.read and counts.bad_rows <= config.max_dropped_ratio * counts.read
        hint += "; or set data.bad_rows: drop" * may_drop
    raise DataError(f"{errors}", hint=hint)


def check_dropped_rows(counts: Counts, config: DataConfig, sources: Sequence[Source]) -> None:
    """Raise DataError where too many data rows are dropped, too many tokens are truncated, or no row remains."""
    check_bad_rows(counts, config)
    if counts.long_prompts and "drop" not in (config.long_rows, config.bad_rows):
        excess, where = max(counts.long_prompts, key=itemgetter(0))
        raise DataError(
            f"{len(counts.long_prompts):,} of {counts.read:,} prompts are longer than train.max_seq_len less "
            f"rollout.max_new_tokens, the longest by {excess:,} tokens: {where}",
            hint=f"raise train.max_seq_len by {excess:,}, or set data.long_rows: drop",
        )
    names = ", ".join(source.path for source in sources)
    dropped = counts.nothing_supervised + counts.too_long_dropped + counts.dropped.rows + counts.bad_rows
    reasons = [f"{counts.nothing_supervised:,} without supervised tokens", f"{counts.too_long_dropped:,} too long"]
    reasons += [f"{rows:,} {DROPPED[name][0]}" for name, (rows, _) in counts.dropped.entries.items()]
    reasons += [f"{counts.bad_rows:,} bad"] * bool(counts.bad_rows)
    reason = ", ".join(reasons)
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
            hint="raise train.max_seq_len, "
            + "for plain text set data.long_rows: split, " * (config.long_rows == "truncate")
            + "set data.long_rows: drop, " * (counts.truncated <= config.max_dropped_ratio * counts.read)
            + "or raise data.max_truncated_ratio",
        )


def check_columns(counts: Counts, config: DataConfig) -> None:
    """Raise DataError where `data.columns` names a column that no data row has."""
    unused = [f"{key}: {column}" for key, column in config.columns.items() if key not in counts.named.entries]
    if unused:
        raise DataError(
            f"data.columns {{{', '.join(unused)}}} has no effect: none of the {counts.read} rows has such a column",
            hint=f"correct the name, or remove the entry; unread columns: {', '.join(counts.unread.entries) or 'none'}",
        )
