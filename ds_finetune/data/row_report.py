"""What became of rows, in lines: dropped and noted rows by reason, columns and fields that nothing reads."""

from collections.abc import Iterator

from ds_finetune.data.documents import Counts

DROPPED = {
    "text": (
        "with a text that the chat template does not render",
        "give a data.template that renders each message once",
    ),
    "plain": (
        "with a system text or history, which the prompt without a chat template leaves out",
        "set data.template to a Jinja file",
    ),
    "calls": (
        "with tool calls that the chat template does not render",
        "give a data.template that renders text and tool calls",
    ),
    "reasoning": (
        "with reasoning that the chat template does not render",
        "set data.reasoning to strip, or give a data.template that renders reasoning_content",
    ),
}
"""Reasons for which a row is left out: what they say of the rows, and what to do."""
NOTED = {
    "tools": "name tools, which the prompt does not hold: the model is not told of them",
    "tools_partly": "name tools of which the chat template leaves out a part",
    "open_call": (
        "hold a tool call that the chat template does not end as it ends other turns: the model may not stop after one"
    ),
    "behind": "end with messages behind the last answer, which are left out",
    "control_text": "hold control tokens in their texts, which are tokenised as text (data.control_tokens text)",
    "control_keep": "hold control tokens in their texts, which stay control tokens (data.control_tokens keep)",
    "control_plain": "hold control tokens, which stay control tokens where no chat template writes the prompt",
}
"""What is said of rows that are trained all the same."""


def dropped_row_lines(counts: Counts) -> list[str]:
    """Each reason for which rows were left out, with their number; the first two also where there are none."""
    reasons = [f"{rows:,} {DROPPED[name][0]}" for name, (rows, _) in counts.dropped.entries.items()]
    return [f"{counts.nothing_supervised:,} with nothing supervised", f"{counts.too_long_dropped:,} too long", *reasons]


def dropped_rows_hint(counts: Counts) -> str:
    """What to do about the reason for which most rows were left out."""
    entries = counts.dropped.entries
    worst = max(entries, key=lambda name: entries[name][0], default=None)
    if worst is None or entries[worst][0] < counts.nothing_supervised + counts.too_long_dropped:
        return "raise train.max_seq_len if prompts fill it, check the template and data.columns, or raise the ratio"
    return f"{DROPPED[worst][1]} (the first such row is {entries[worst][1]})"


def row_notes(counts: Counts) -> Iterator[str]:
    """What a person should know of the rows before they are trained, a line each."""
    for name, (rows, first) in counts.dropped.entries.items():
        yield f"{rows:,} of {counts.read:,} rows are dropped: rows {DROPPED[name][0]}; the first is {first}"
    for name, (rows, first) in counts.noted.entries.items():
        yield f"{rows:,} of {counts.read:,} rows {NOTED[name]}; the first is {first}"
    if counts.unread.entries:
        names = ", ".join(f"{name} ({rows:,} rows)" for name, (rows, _) in counts.unread.entries.items())
        yield f"columns and fields that nothing reads: {names}"


def server_prompt_line(counts: Counts) -> str:
    """Rows of which a trained turn's prompt is not what `apply_chat_template` gives a server for the messages before
    it.
    """
    share = counts.server_prompt_differs / max(counts.read, 1)
    return f"{counts.server_prompt_differs:,} of {counts.read:,} rows ({share:.1%}) have a prompt other than a server's"
