"""Layouts of a record: how its columns become a conversation, a prompt with its completion, or plain text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.data.messages import Conversation, check_text, read_conversation, read_tools
from ds_finetune.data.sources import Record
from ds_finetune.errors import DataError

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion; `conversation` has both as messages, for tokenizers with a chat template."""

    prompt: str
    completion: str
    conversation: Conversation


@dataclass(frozen=True)
class PlainText:
    """A document of which every token is supervised."""

    text: str


Sample = Conversation | Completion | PlainText


def recognise_layout(record: Record, columns: Mapping[str, str], where: str) -> str:
    """The first layout whose columns the record has; DataError where no layout fits."""
    names = set(record) | {key for key, column in columns.items() if column in record}
    for name, layout in LAYOUTS.items():
        if layout.needed <= names:
            return name
    known = "; ".join(f"{name}: {', '.join(sorted(layout.needed))}" for name, layout in LAYOUTS.items())
    raise DataError(
        f"{where} has columns {', '.join(sorted(record))}, which fit no layout",
        hint=f"name them under data.columns; layouts are {known}",
    )


def read_sample(record: Record, layout: str, columns: Mapping[str, str], where: str) -> Sample:
    """A record of `layout` as a sample; DataError for a missing column, a wrong type or an unknown role."""
    needed, read = LAYOUTS[layout].needed, LAYOUTS[layout].read
    _check_objective(record, columns, where)
    view = {**record, **{key: record[column] for key, column in columns.items() if column in record}}
    absent = sorted(needed - view.keys())
    if absent:
        names = [columns.get(name, name) for name in absent]
        raise DataError(
            f"{where} has no column `{names[0]}` (columns: {', '.join(sorted(record))})",
            hint=f"layout {layout} needs {', '.join(sorted(needed))}",
        )
    return read(view, where)


def unread_columns(record: Record, layout: str, columns: Mapping[str, str]) -> list[str]:
    """Columns with a value that `layout` does not use."""
    read = LAYOUTS[layout].needed | LAYOUTS[layout].optional
    used = {columns[name] if columns.get(name) in record else name for name in read}
    return [name for name, value in record.items() if name not in used and value is not None]


def _check_objective(record: Record, columns: Mapping[str, str], where: str) -> None:
    """DataError for rows of other objectives, with answers that must not be imitated, and for rows with media."""
    present = {name for name, value in record.items() if value is not None} - set(columns.values())
    if {"chosen", "rejected"} <= present:
        raise DataError(
            f"{where} is a preference row (columns {', '.join(sorted(record))}), and fine-tuning is supervised",
            hint="give rows with one answer each, or name the one to imitate: data.columns {completion: chosen}",
        )
    if "kto_tag" in present or ("label" in present and isinstance(record["label"], bool)):
        raise DataError(
            f"{where} is a KTO row, whose answer is marked as good or bad (columns {', '.join(sorted(record))}), "
            "and fine-tuning is supervised",
            hint="keep the rows whose answer is to be imitated, and remove the column with the labels",
        )
    media = [name for name in _MEDIA if name in present and record[name]]
    if media:
        raise DataError(
            f"{where} has media in column `{media[0]}`, and only text is trained",
            hint="remove such rows, or the column",
        )


def _text(view: Mapping[str, Any], key: str, where: str) -> str:
    return check_text(view.get(key), f"{where}: column `{key}`")


def _optional(view: Mapping[str, Any], key: str, where: str) -> str:
    return _text(view, key, where) if view.get(key) is not None else ""


def _messages(view: Mapping[str, Any], where: str) -> Sample:
    return read_conversation(view["messages"], view.get("tools") or view.get("functions"), "messages", where)


def _sharegpt(view: Mapping[str, Any], where: str) -> Sample:
    system = _optional(view, "system", where)
    turns = view["conversations"]
    if system and isinstance(turns, list | tuple):
        turns = [{"role": "system", "content": system}, *turns]
    return read_conversation(turns, view.get("tools"), "conversations", where)


def _alpaca(view: Mapping[str, Any], where: str) -> Sample:
    instruction, answer = _text(view, "instruction", where), _text(view, "output", where)
    context = _optional(view, "input", where)
    intro = ALPACA_PROMPT_WITH_INPUT if context else ALPACA_PROMPT
    prompt = (
        f"{intro}### Instruction:\n{instruction}\n\n"
        + (f"### Input:\n{context}\n\n" if context else "")
        + "### Response:\n"
    )
    history: list[dict[str, str]] = []
    for question, reply in _history(view, where):
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    system = [{"role": "system", "content": _text(view, "system", where)}] if view.get("system") else []
    request = f"{instruction}\n{context}" if context else instruction
    turns = [*system, *history, {"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    return Completion(prompt, answer, Conversation(tuple(turns)))


def _history(view: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """Earlier questions and their answers."""
    pairs = view.get("history") or []
    is_list = isinstance(pairs, list | tuple)
    if not is_list or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        hint = "give a list of [question, answer] pairs"
        raise DataError(f"{where}: column `history` is {pairs!r:.60}", hint=hint)
    what = f"{where}: column `history`"
    return [(check_text(question, what), check_text(reply, what)) for question, reply in pairs]


def _prompt_completion(view: Mapping[str, Any], where: str) -> Sample:
    prompt, completion = view["prompt"], view["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return read_conversation([*prompt, *completion], view.get("tools"), "prompt, completion", where)
    question, answer = _text(view, "prompt", where), _text(view, "completion", where)
    turns = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Completion(question, answer, Conversation(turns, read_tools(view.get("tools"), where)))


def _plain(view: Mapping[str, Any], where: str) -> Sample:
    return PlainText(_text(view, "text", where))


@dataclass(frozen=True)
class LayoutColumns:
    """Columns that a layout needs, optional ones, and the function that reads a record."""

    needed: frozenset[str]
    optional: frozenset[str]
    read: Callable[[Mapping[str, Any], str], Sample]


LAYOUTS: Mapping[str, LayoutColumns] = {
    "messages": LayoutColumns(frozenset({"messages"}), frozenset({"tools", "functions"}), _messages),
    "sharegpt": LayoutColumns(frozenset({"conversations"}), frozenset({"system", "tools"}), _sharegpt),
    "alpaca": LayoutColumns(frozenset({"instruction", "output"}), frozenset({"input", "system", "history"}), _alpaca),
    "prompt_completion": LayoutColumns(frozenset({"prompt", "completion"}), frozenset({"tools"}), _prompt_completion),
    "text": LayoutColumns(frozenset({"text"}), frozenset(), _plain),
}
"""Layouts by name, in the order in which they are tried."""
