"""Layouts of data records: how columns become a conversation, a prompt with its completion, or plain text."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from ds_finetune.data.files import Record
from ds_finetune.data.messages import ANSWER_ROLES, Conversation, check_text, read_conversation, read_tools
from ds_finetune.errors import DataError

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)
_HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}
_OTHER_NAMES = (
    {"completion": "response"},
    {"prompt": "query", "completion": "response"},
    {"prompt": "question", "completion": "response"},
    {"output": "response", "input": "context"},
    {"output": "response"},
    {"prompt": "question"},
    {"prompt": "problem"},
    {"prompt": "query"},
    {"chosen": "chosen_messages", "rejected": "rejected_messages"},
)
"""Column names in published data sets that stand for names of our layouts, tried in this order if no layout fits. They
are from HelpSteer, verl, ms-swift, Orca, dolly, GPTeacher, data sets of prompts with reference answers, and pairs of
LLaMA-Factory.
"""
_PAIRS_OF_TEXTS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence", "sentence2"),
)
"""Column names of the two texts in GLUE's tasks. A task with a single text has only `sentence`."""
_GUESSES = {
    "prompt": "prompt question query input instruction problem prompts questions",
    "completion": "completion response answer output solution generation target targets completions responses answers",
    "chosen": "chosen chosen_response response_chosen chosen_answer preferred better winner",
    "rejected": "rejected rejected_response response_rejected rejected_answer dispreferred worse loser",
}
"""Frequent column names in lower case, for hints that suggest which column has the prompt, the answer and so on."""


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion; `conversation` has both as messages, for tokenizers with a chat template."""

    prompt: str
    completion: str
    conversation: Conversation
    has_all_turns: bool = False
    """Whether the completion's `prompt` has all messages before the answer, not only the last one."""
    is_joined: bool = False
    """Whether the completion's `prompt` already ends with the separator before the answer."""
    wrapper: str = ""
    """`alpaca` if the layout puts Alpaca's instructions around the prompt, else empty."""

    def with_system(self, text: str, where: str) -> Self:
        """Prepend a system message to the completion's prompt."""
        return replace(self, conversation=self.conversation.with_system(text, where), has_all_turns=False)


@dataclass(frozen=True)
class PlainText:
    """A document in which every token is supervised."""

    text: str


Sample = Conversation | Completion | PlainText


@dataclass(frozen=True)
class LabelledCompletion:
    """A dialogue whose last answer is labelled good or bad."""

    sample: Sample
    is_good: bool


@dataclass(frozen=True)
class LabelledText:
    """A text, or a pair of texts, with its class index or regression label."""

    text: str
    text_pair: str | None
    target: float


def published_columns(
    record: Record, columns: Mapping[str, str], layouts: Mapping[str, "LayoutColumns"]
) -> dict[str, str]:
    """Add to `columns` the names in `record` that published data sets use for columns of `layouts`."""
    renamed = dict(columns)
    if "system" not in record and "system_prompt" in record:
        renamed = {"system": "system_prompt", **renamed}
    if find_layout(record, renamed, layouts) is None:
        candidates = (names for names in _OTHER_NAMES if set(names.values()) <= record.keys())
        fitting = (names for names in candidates if find_layout(record, {**names, **renamed}, layouts))
        return {**next(fitting, {}), **renamed}
    return renamed


def default_columns(record: Record, columns: Mapping[str, str]) -> dict[str, str]:
    """Add to `columns` the names that KTO's and GLUE's data sets use for `label`, `text` and `text_pair`."""
    defaults: dict[str, str] = {}
    if "label" not in record and "kto_tag" in record:
        defaults["label"] = "kto_tag"
    if "text" not in record:
        first, second = next((pair for pair in _PAIRS_OF_TEXTS if pair[0] in record), ("", ""))
        defaults |= {key: name for key, name in (("text", first), ("text_pair", second)) if name in record}
    return {**defaults, **columns}


def columns_line(record: Record, *keys: str) -> str:
    """Line of a run file that sets `keys` of data.columns to likely columns; empty if a key has none."""
    names = {name.lower(): name for name in sorted(record, reverse=True)}
    guesses = {key: next((names[name] for name in _GUESSES[key].split() if name in names), "") for key in keys}
    line = ", ".join(f"{key}: {name}" for key, name in guesses.items() if key != name)
    return f"set data.columns: {{{line}}}" if line and all(guesses.values()) else ""


def find_layout(record: Record, columns: Mapping[str, str], layouts: Mapping[str, "LayoutColumns"]) -> str | None:
    """Name of the first of `layouts` whose columns the record has; None where no layout fits."""
    names = set(record) | {key for key, column in columns.items() if column in record}
    return next((name for name, layout in layouts.items() if layout.needed <= names), None)


def known_layouts(layouts: Mapping[str, "LayoutColumns"]) -> str:
    """List the layouts with the columns that they need, as text for messages."""
    return "; ".join(f"{name}: {', '.join(sorted(layout.needed))}" for name, layout in layouts.items())


def view_columns(record: Record, layout: "LayoutColumns", columns: Mapping[str, str], where: str) -> Mapping[str, Any]:
    """Rename the record's columns to the names of the layout; DataError where a needed column is missing."""
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
    """Names of the record's columns that have a value and that `layout` does not read."""
    used = {columns[name] if columns.get(name) in record else name for name in layout.needed | layout.optional}
    return [name for name, value in record.items() if name not in used and value is not None]


def check_supervised(record: Record, columns: Mapping[str, str], where: str) -> None:
    """Raise DataError for preference and KTO rows in supervised fine-tuning, which must not imitate bad answers."""
    present = _present(record, columns)
    if {"chosen", "rejected"} <= present:
        raise DataError(
            f"{where} is a preference row (columns {', '.join(sorted(record))}), and this objective imitates "
            "all answers",
            hint="train such rows with objective dpo, simpo, cpo, orpo or reward, or name the answer to imitate: "
            f"data.columns {{{'completion' if 'prompt' in record else 'messages'}: chosen}}",
        )
    if "kto_tag" in present or ("label" in present and isinstance(record["label"], bool)):
        raise DataError(
            f"{where} is a KTO row, whose answer is labelled good or bad (columns {', '.join(sorted(record))}), "
            "but this objective would imitate all answers",
            hint="train such rows with objective kto, or keep the rows whose answer is to be imitated, and remove the "
            "column with the labels",
        )


def check_media(record: Record, columns: Mapping[str, str], where: str) -> None:
    """Raise DataError for data rows with images, videos or audio."""
    media = [name for name in _MEDIA if name in _present(record, columns) and record[name]]
    if media:
        raise DataError(
            f"{where} has media in column `{media[0]}`, and only text is trained",
            hint="remove such rows, or the column",
        )


def check_no_tree(record: Record, where: str) -> None:
    """Raise DataError for OpenAssistant's messages and trees, in which a message has several replies."""
    prompt = record.get("prompt")
    if {"message_id", "parent_id"} <= record.keys() or (isinstance(prompt, Mapping) and "replies" in prompt):
        raise DataError(
            f"{where} is a message or a tree of OpenAssistant (columns {', '.join(sorted(record))}), and a row is one "
            "dialogue",
            hint="write one row {messages: [{role, content}, ...]} for each path from the prompt to an answer, e.g. "
            "along the replies of rank 0",
        )


def _present(record: Record, columns: Mapping[str, str]) -> set[str]:
    return {name for name, value in record.items() if value is not None} - set(columns.values())


def read_text(view: Mapping[str, Any], key: str, where: str) -> str:
    """Text in the column `key` of a record; DataError if the value is no text."""
    return check_text(view.get(key), f"{where}: column `{key}`")


def read_optional_text(view: Mapping[str, Any], key: str, where: str) -> str:
    """Text in the column `key` of a record; empty if the record has no such column."""
    return read_text(view, key, where) if view.get(key) is not None else ""


def completion_of(prompt: str, answer: str, tools: tuple[Mapping[str, Any], ...] | None, where: str) -> Completion:
    """Make a completion from an answer and a prompt, which is one user turn or HH-RLHF's turns up to `Assistant:`."""
    turns = hh_turns(prompt)
    if not turns:
        turns = [{"role": "user", "content": prompt}]
    elif turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip():
        turns.pop()
    last = {"role": "assistant", "content": answer}
    check_not_continued(turns, [last], where)
    return Completion(prompt, answer, Conversation((*turns, last), tools), has_all_turns=bool(hh_turns(prompt)))


def hh_turns(text: str) -> list[dict[str, str]]:
    """Turns of a dialogue in the form of Anthropic's HH-RLHF; empty for other texts."""
    before, *parts = _HH_TURN.split(text)
    if before or parts[:1] != ["Human"] or "Assistant" not in parts[::2]:
        return []
    return [
        {"role": _HH_ROLES[name], "content": content.removeprefix(" ")}
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def check_not_continued(prompt: Sequence[object], answer: Sequence[object], where: str) -> None:
    """Raise DataError if both the last turn of the prompt and the first turn of the answer are an assistant's."""
    if prompt and answer and is_answer(prompt[-1]) and is_answer(answer[0]):
        raise DataError(
            f"{where}: the prompt ends with an assistant turn, {prompt[-1]!r:.60}, and the answer follows it",
            hint="end the prompt with the user's turn, or put the beginning of an answer into the answer itself",
        )


def role_of(turn: object) -> object:
    """Role of a message in OpenAI's or ShareGPT's form; None for a message without a role."""
    return turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None


def is_answer(turn: object) -> bool:
    """Whether a message in OpenAI's or ShareGPT's form is an assistant message."""
    return role_of(turn) in ANSWER_ROLES


def _messages(view: Mapping[str, Any], where: str) -> Sample:
    turns = view["messages"]
    if isinstance(turns, str):
        turns = hh_turns(read_text(view, "messages", where)) or turns
    return read_conversation(turns, view.get("tools") or view.get("functions"), "messages", where)


def read_alpaca(view: Mapping[str, Any], where: str) -> Completion:
    """Read Alpaca's columns `instruction`, `output`, and optionally `input`, `system` and `history`."""
    instruction, answer = read_text(view, "instruction", where), read_text(view, "output", where)
    context = read_optional_text(view, "input", where)
    intro = ALPACA_PROMPT_WITH_INPUT if context else ALPACA_PROMPT
    prompt = (
        f"{intro}### Instruction:\n{instruction}\n\n"
        + (f"### Input:\n{context}\n\n" if context else "")
        + "### Response:\n"
    )
    request = f"{instruction}\n{context}" if context else instruction
    last = ({"role": "user", "content": request}, {"role": "assistant", "content": answer})
    return Completion(prompt, answer, Conversation((*_history(view, where), *last)), wrapper="alpaca")


def _history(view: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    pairs, column = view.get("history") or [], f"{where}: column `history`"
    is_list = isinstance(pairs, list | tuple)
    if not is_list or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise DataError(f"{column} is {pairs!r:.60}, no list of pairs", hint="give a list of [question, answer] pairs")
    turns = ((role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True))
    return [{"role": role, "content": check_text(text, column)} for role, text in turns]


def _prompt_completion(view: Mapping[str, Any], where: str) -> Sample:
    prompt, completion = view["prompt"], view["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        check_not_continued(prompt, completion, where)
        dialogue = read_conversation([*prompt, *completion], view.get("tools"), "prompt, completion", where)
        num_messages = len(read_conversation(prompt, None, "prompt", where).messages) if prompt else 0
        turns = dialogue.messages
        # Assistant turns in a prompt are not trained; TRL does not train them either.
        untrained = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in turns[:num_messages]]
        return replace(dialogue, messages=(*untrained, *turns[num_messages:]))
    question, answer = read_text(view, "prompt", where), read_text(view, "completion", where)
    sample = completion_of(question, answer, read_tools(view.get("tools"), where), where)
    history = _history(view, where)
    if not history:
        return sample
    turns = (*history, *sample.conversation.messages)
    return replace(sample, conversation=replace(sample.conversation, messages=turns), has_all_turns=False)


def _texts(view: Mapping[str, Any], where: str) -> tuple[str, str | None]:
    pair = read_text(view, "text_pair", where) if view.get("text_pair") is not None else None
    return read_text(view, "text", where), pair


@dataclass(frozen=True)
class LayoutColumns:
    """Layout of a data row: its name, its needed and optional columns, and the function that reads a record."""

    name: str
    needed: frozenset[str]
    optional: frozenset[str]
    read: Callable[[Mapping[str, Any], str], Any]


def by_name(*layouts: tuple[str, str, str, Callable[[Mapping[str, Any], str], Any]]) -> Mapping[str, LayoutColumns]:
    """Make a mapping of row layouts from tuples of name, needed and optional columns (separated by spaces), and
    function.

    The text of an optional column `system` is prepended to the function's result as the first turn.
    """
    return {
        name: LayoutColumns(
            name,
            frozenset(needed.split()),
            frozenset(optional.split()),
            partial(_read_with_system, read) if "system" in optional.split() else read,
        )
        for name, needed, optional, read in layouts
    }


def _read_with_system(read: Callable[[Mapping[str, Any], str], Any], view: Mapping[str, Any], where: str) -> object:
    sample = read(view, where)
    text = read_optional_text(view, "system", where)
    return sample.with_system(text, where) if text else sample


LAYOUTS = by_name(
    ("messages", "messages", "system tools functions", _messages),
    (
        "sharegpt",
        "conversations",
        "system tools",
        lambda view, where: read_conversation(view["conversations"], view.get("tools"), "conversations", where),
    ),
    ("alpaca", "instruction output", "input system history", read_alpaca),
    ("prompt_completion", "prompt completion", "system history tools", _prompt_completion),
    ("text", "text", "", lambda view, where: PlainText(read_text(view, "text", where))),
)
COMPLETION_LAYOUTS = {
    name: replace(layout, needed=layout.needed | {"label"}) for name, layout in LAYOUTS.items() if name != "text"
}
LABELLED_LAYOUTS = by_name(("labelled", "text label", "text_pair", _texts))
