"""Layouts of a record: what its columns mean, as a conversation, a prompt with its completion, or text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.data.sources import Record
from ds_finetune.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
ALPACA_PROMPT = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
)


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI's form, and the tools that may be called."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion; `conversation` is the same as one turn, for tokenizers with a chat template."""

    prompt: str
    completion: str
    conversation: Conversation


@dataclass(frozen=True)
class PlainText:
    """A document of which every token is learnt."""

    text: str


Sample = Conversation | Completion | PlainText


def recognise(record: Record, columns: Mapping[str, str], where: str) -> str:
    """The layout whose columns the record has; DataError names the columns found and wanted."""
    names = set(record) | {key for key, column in columns.items() if column in record}
    for layout, (needed, _) in LAYOUTS.items():
        if needed <= names:
            return layout
    wanted = "; ".join(f"{layout}: {', '.join(sorted(needed))}" for layout, (needed, _) in LAYOUTS.items())
    raise DataError(
        f"{where} has columns {', '.join(sorted(record))}, which fit no layout", hint=f"name them under data.columns; layouts are {wanted}"
    )


def read_sample(record: Record, layout: str, columns: Mapping[str, str], where: str) -> Sample:
    """A record of `layout` as a sample; DataError for a missing column, a wrong type or an unknown role."""
    needed, read = LAYOUTS[layout]
    view = {**record, **{key: record[column] for key, column in columns.items() if column in record}}
    absent = sorted(needed - view.keys())
    if absent:
        asked = [columns.get(name, name) for name in absent]
        raise DataError(
            f"{where} has no column `{asked[0]}` (columns: {', '.join(sorted(record))})", hint=f"layout {layout} needs {', '.join(sorted(needed))}"
        )
    return read(view, where)


def _text(view: Mapping[str, Any], key: str, where: str) -> str:
    value = view.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: column `{key}` holds {type(value).__name__} {value!r:.60}, not text", hint="mend the row, or name another column")
    return value


def _messages(view: Mapping[str, Any], where: str) -> Sample:
    messages = view["messages"]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: `messages` holds {type(messages).__name__} {messages!r:.60}", hint="give a list of {role, content}")
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else message
        if role not in ROLES:
            raise DataError(f"{where}: unknown role {role!r}", hint=f"roles are {', '.join(ROLES)}")
    return Conversation(tuple(messages), tuple(view["tools"]) if view.get("tools") else None)


def _sharegpt(view: Mapping[str, Any], where: str) -> Sample:
    messages: list[dict[str, Any]] = []
    if view.get("system"):
        messages.append({"role": "system", "content": view["system"]})
    for turn in view["conversations"]:
        role = _SHAREGPT_ROLES.get(turn.get("from", turn.get("role")))
        if role is None:
            raise DataError(f"{where}: unknown role {turn.get('from')!r}", hint=f"sharegpt roles are {', '.join(sorted(_SHAREGPT_ROLES))}")
        messages.append({"role": role, "content": turn.get("value", turn.get("content"))})
    return Conversation(tuple(messages))


def _alpaca(view: Mapping[str, Any], where: str) -> Sample:
    instruction, answer = _text(view, "instruction", where), _text(view, "output", where)
    given = view.get("input") or ""
    intro = ALPACA_PROMPT_WITH_INPUT if given else ALPACA_PROMPT
    prompt = f"{intro}### Instruction:\n{instruction}\n\n" + (f"### Input:\n{given}\n\n" if given else "") + "### Response:\n"
    history = [m for asked, said in view.get("history") or () for m in ({"role": "user", "content": asked}, {"role": "assistant", "content": said})]
    system = [{"role": "system", "content": view["system"]}] if view.get("system") else []
    question = f"{instruction}\n{given}" if given else instruction
    turns = [*system, *history, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Completion(prompt, answer, Conversation(tuple(turns)))


def _prompt_completion(view: Mapping[str, Any], where: str) -> Sample:
    prompt, completion = view["prompt"], view["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return _messages({"messages": [*prompt, *completion], "tools": view.get("tools")}, where)
    asked, answer = _text(view, "prompt", where), _text(view, "completion", where)
    turns = ({"role": "user", "content": asked}, {"role": "assistant", "content": answer})
    return Completion(asked, answer, Conversation(turns))


def _plain(view: Mapping[str, Any], where: str) -> Sample:
    return PlainText(_text(view, "text", where))


LAYOUTS: Mapping[str, tuple[frozenset[str], Callable[[Mapping[str, Any], str], Sample]]] = {
    "messages": (frozenset({"messages"}), _messages),
    "sharegpt": (frozenset({"conversations"}), _sharegpt),
    "alpaca": (frozenset({"instruction", "output"}), _alpaca),
    "prompt_completion": (frozenset({"prompt", "completion"}), _prompt_completion),
    "text": (frozenset({"text"}), _plain),
}
"""Columns each layout needs, and its reader, in the order they are recognised."""
