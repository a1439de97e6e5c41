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
    has_all_turns: bool = False
    """Whether `prompt` has every message before the answer, even if there are several."""
    is_joined: bool = False
    """Whether `prompt` ends with the separator that it needs."""


@dataclass(frozen=True)
class PlainText:
    """A document of which every token is supervised."""

    text: str


Sample = Conversation | Completion | PlainText


def find_layout(record: Record, columns: Mapping[str, str], layouts: Mapping[str, "LayoutColumns"]) -> str | None:
    """The first of `layouts` whose columns the record has; None where no layout fits."""
    names = set(record) | {key for key, column in columns.items() if column in record}
    return next((name for name, layout in layouts.items() if layout.needed <= names), None)


def recognise_layout(record: Record, columns: Mapping[str, str], where: str) -> str:
    """The first layout whose columns the record has; DataError where no layout fits."""
    found = find_layout(record, columns, LAYOUTS)
    if found is not None:
        return found
    raise DataError(
        f"{where} has columns {', '.join(sorted(record))}, which fit no layout{_absent_columns(record, columns)}",
        hint=f"name them under data.columns; layouts are {known_layouts(LAYOUTS)}",
    )


def _absent_columns(record: Record, columns: Mapping[str, str]) -> str:
    """What an error adds where data.columns names columns that a record does not have."""
    absent = [f"{key}: {column}" for key, column in columns.items() if column not in record]
    return f", and data.columns names others: {', '.join(absent)}" if absent else ""


def known_layouts(layouts: Mapping[str, "LayoutColumns"]) -> str:
    """The layouts with their columns, for messages."""
    return "; ".join(f"{name}: {', '.join(sorted(layout.needed))}" for name, layout in layouts.items())


def view_columns(record: Record, layout: "LayoutColumns", columns: Mapping[str, str], where: str) -> Mapping[str, Any]:
    """The record with the layout's own names of its columns; DataError where one is missing."""
    view = {**record, **{key: record[column] for key, column in columns.items() if column in record}}
    absent = sorted(layout.needed - view.keys())
    if absent:
        names = [columns.get(name, name) for name in absent]
        raise DataError(
            f"{where} has no column `{names[0]}` (columns: {', '.join(sorted(record))})",
            hint=f"layout {layout.name} needs {', '.join(sorted(layout.needed))}",
        )
    return view


def unread_columns(record: Record, layout: "LayoutColumns", columns: Mapping[str, str]) -> list[str]:
    """Columns with a value that `layout` does not use."""
    used = {columns[name] if columns.get(name) in record else name for name in layout.needed | layout.optional}
    return [name for name, value in record.items() if name not in used and value is not None]


def check_supervised(record: Record, columns: Mapping[str, str], where: str) -> None:
    """DataError for rows of other objectives, with answers that must not be imitated."""
    present = _present(record, columns)
    if {"chosen", "rejected"} <= present:
        raise DataError(
            f"{where} is a preference row (columns {', '.join(sorted(record))}), and fine-tuning is supervised",
            hint="train them with objective dpo, simpo, cpo, orpo or reward, or name the answer to imitate: "
            "data.columns {completion: chosen}",
        )
    if "kto_tag" in present or ("label" in present and isinstance(record["label"], bool)):
        raise DataError(
            f"{where} is a KTO row, whose answer is marked as good or bad (columns {', '.join(sorted(record))}), "
            "and fine-tuning is supervised",
            hint="train them with objective kto, or keep the rows whose answer is to be imitated, and remove the "
            "column with the labels",
        )


def check_media(record: Record, columns: Mapping[str, str], where: str) -> None:
    """DataError for rows with images, videos or audio."""
    media = [name for name in _MEDIA if name in _present(record, columns) and record[name]]
    if media:
        raise DataError(
            f"{where} has media in column `{media[0]}`, and only text is trained",
            hint="remove such rows, or the column",
        )


def _present(record: Record, columns: Mapping[str, str]) -> set[str]:
    """Columns with a value, without those that data.columns names."""
    return {name for name, value in record.items() if value is not None} - set(columns.values())


def read_text(view: Mapping[str, Any], key: str, where: str) -> str:
    """The text of a column; DataError where it is none."""
    return check_text(view.get(key), f"{where}: column `{key}`")


def read_optional_text(view: Mapping[str, Any], key: str, where: str) -> str:
    """The text of a column; empty where there is none."""
    return read_text(view, key, where) if view.get(key) is not None else ""


def system_turns(view: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    """The text of the column `system` as a turn; none where there is no such text."""
    text = read_optional_text(view, "system", where)
    return [{"role": "system", "content": text}] if text else []


def completion_of(prompt: str, answer: str, tools: tuple[Mapping[str, Any], ...] | None) -> Completion:
    """An answer to a prompt, which are a turn each."""
    turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    return Completion(prompt, answer, Conversation(turns, tools))


def _messages(view: Mapping[str, Any], where: str) -> Sample:
    return read_conversation(view["messages"], view.get("tools") or view.get("functions"), "messages", where)


def _sharegpt(view: Mapping[str, Any], where: str) -> Sample:
    turns = view["conversations"]
    if isinstance(turns, list | tuple):
        turns = [*system_turns(view, where), *turns]
    return read_conversation(turns, view.get("tools"), "conversations", where)


def read_alpaca(view: Mapping[str, Any], where: str) -> Completion:
    """Alpaca's columns `instruction`, `output`, and optionally `input`, `system` and `history`."""
    instruction, answer = read_text(view, "instruction", where), read_text(view, "output", where)
    context = read_optional_text(view, "input", where)
    intro = ALPACA_PROMPT_WITH_INPUT if context else ALPACA_PROMPT
    prompt = (
        f"{intro}### Instruction:\n{instruction}\n\n"
        + (f"### Input:\n{context}\n\n" if context else "")
        + "### Response:\n"
    )
    history: list[dict[str, str]] = []
    for question, reply in _history(view, where):
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    request = f"{instruction}\n{context}" if context else instruction
    last = completion_of(request, answer, None).conversation.messages
    return Completion(prompt, answer, Conversation((*system_turns(view, where), *history, *last)))


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
    question, answer = read_text(view, "prompt", where), read_text(view, "completion", where)
    return completion_of(question, answer, read_tools(view.get("tools"), where))


def _plain(view: Mapping[str, Any], where: str) -> Sample:
    return PlainText(read_text(view, "text", where))


@dataclass(frozen=True)
class LayoutColumns:
    """A layout: its name, columns that it needs, optional ones, and the function that reads a record."""

    name: str
    needed: frozenset[str]
    optional: frozenset[str]
    read: Callable[[Mapping[str, Any], str], Any]


def by_name(*layouts: tuple[str, str, str, Callable[[Mapping[str, Any], str], Any]]) -> Mapping[str, LayoutColumns]:
    """Layouts from their names, needed and optional columns (separated by spaces), and functions."""
    return {
        name: LayoutColumns(name, frozenset(needed.split()), frozenset(optional.split()), read)
        for name, needed, optional, read in layouts
    }


LAYOUTS = by_name(
    ("messages", "messages", "tools functions", _messages),
    ("sharegpt", "conversations", "system tools", _sharegpt),
    ("alpaca", "instruction output", "input system history", read_alpaca),
    ("prompt_completion", "prompt completion", "tools", _prompt_completion),
    ("text", "text", "", _plain),
)
"""Layouts by name, in the order in which they are tried."""
