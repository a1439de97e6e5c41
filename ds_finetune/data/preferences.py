"""Layouts of preference data: how the columns of a record become a chosen and a rejected answer.

The last assistant turn of a dialogue is its answer. The turns before it must be equal for both answers.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from ds_finetune.data.messages import (
    Conversation,
    check_text,
    no_lists_in_csv,
    read_conversation,
    read_tools,
    shown_value,
)
from ds_finetune.data.record_layouts import (
    Completion,
    by_name,
    check_not_continued,
    columns_line,
    completion_of,
    hh_turns,
    is_answer,
    read_alpaca,
    read_text,
    role_of,
)
from ds_finetune.errors import DataError

ReadPair = Callable[[Mapping[str, Any], str], "Preference"]
_SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Preference:
    """A chosen and a rejected answer to the same prompt. `margin` is 0 where the data row has none."""

    chosen: Conversation | Completion
    rejected: Conversation | Completion
    margin: float = 0.0

    def with_system(self, text: str, where: str) -> Self:
        """Prepend a system message to the dialogues of both answers."""
        chosen, rejected = (side.with_system(text, where) for side in (self.chosen, self.rejected))
        return replace(self, chosen=chosen, rejected=rejected)


def _preference(sides: Sequence[Conversation | Completion], view: Mapping[str, Any], where: str) -> Preference:
    chosen, rejected = sides
    margin = view.get("margin")
    if margin is None:
        return Preference(chosen, rejected)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"{where}: column `margin` is {shown_value(margin)}", hint="give a finite number")
    return Preference(chosen, rejected, float(margin))


def _of_turns(dialogues: Mapping[str, object], view: Mapping[str, Any], where: str) -> Preference:
    sides = {column: read_conversation(turns, view.get("tools"), column, where) for column, turns in dialogues.items()}
    for column, side in sides.items():
        role = side.messages[-1]["role"]
        if role != "assistant":
            raise DataError(
                f"{where}: the last turn of `{column}` has the role {role}, not assistant",
                hint="end both sides with the answer, or remove the row",
            )
    _check_same_turns(sides, where)
    if all(len(side.messages) == 1 for side in sides.values()):
        raise DataError(
            f"{where}: {' and '.join(f'`{column}`' for column in sides)} are answers without a prompt",
            hint=columns_line(view, "prompt", "chosen", "rejected")
            or "give the prompt as first turns of both sides, or in a column `prompt` or `messages`",
        )
    return _preference([*sides.values()], view, where)


def _check_same_turns(sides: Mapping[str, Conversation], where: str) -> None:
    ours, theirs = (side.messages[:-1] for side in sides.values())
    if ours == theirs:
        return
    pairs = enumerate(zip(ours, theirs, strict=False))
    number = next((n for n, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    turn_of_chosen, turn_of_rejected = (
        f"of `{column}` is {_shown_turn(side, number)}" for column, side in zip(sides, (ours, theirs), strict=True)
    )
    raise DataError(
        f"{where}: turns before the answers must be equal: turn {number + 1} {turn_of_rejected}, and {turn_of_chosen}",
        hint="give both answers to the same prompt, or remove the row",
    )


def _shown_turn(turns: Sequence[Mapping[str, Any]], number: int) -> str:
    return f"{turns[number]['role']} {turns[number]['content']!r:.60}" if number < len(turns) else "the answer"


def _as_turns(answer: object, column: str, where: str) -> list[Any]:
    if isinstance(answer, list | tuple):
        if answer and all(isinstance(text, str) for text in answer):
            raise DataError(
                f"{where}: `{column}` is a list of {len(answer)} answers, and a row is one pair",
                hint="write one row for each pair of a chosen and a rejected answer",
            )
        return list(answer)
    if isinstance(answer, Mapping):
        return [answer]
    return [{"role": "assistant", "content": check_text(answer, f"{where}: column `{column}`")}]


def _list_of_turns(view: Mapping[str, Any], column: str, where: str) -> list[Any]:
    turns = view[column]
    if not isinstance(turns, list | tuple):
        raise DataError(
            f"{where}: `{column}` is {shown_value(turns)}, no list of messages",
            hint=f"give a list of {{role, content}}{no_lists_in_csv(turns)}",
        )
    return list(turns)


def _prompt_pair(view: Mapping[str, Any], where: str) -> Preference:
    prompt, sides = view["prompt"], (view["chosen"], view["rejected"])
    if all(isinstance(value, str) for value in (prompt, *sides)):
        tools = read_tools(view.get("tools"), where)
        text = read_text(view, "prompt", where)
        samples = [completion_of(text, read_text(view, side, where), tools, where) for side in _SIDES]
        return _preference(samples, view, where)
    dialogues = {
        column: _with_prompt(prompt, _as_turns(side, column, where), column, where)
        for column, side in zip(_SIDES, sides, strict=True)
    }
    return _of_turns(dialogues, view, where)


def _chat_pair(view: Mapping[str, Any], where: str) -> Preference:
    """Make a preference from two answers, and from `messages`: the prompt, or the full chosen dialogue."""
    turns, sides = view["messages"], (view["chosen"], view["rejected"])
    if isinstance(turns, list | tuple) and turns and is_answer(turns[-1]):
        turns = turns[:-1] if list(turns) == sides[0] else turns
    return _prompt_pair({**view, "prompt": turns}, where)


def _with_prompt(prompt: object, turns: list[Any], column: str, where: str) -> list[Any]:
    """Prepend the prompt to the turns of an answer, unless they already begin with the prompt."""
    is_text = isinstance(prompt, str)
    first = [{"role": "user", "content": prompt}] if is_text else _as_turns(prompt, "prompt", where)
    if len(turns) <= 1 or is_answer(turns[0]):
        check_not_continued(first, turns, where)
        return [*first, *turns]
    repeats = (
        any(isinstance(turn, Mapping) and turn.get("content", turn.get("value")) == prompt for turn in turns[:-1])
        if is_text
        else list(turns[: len(first)]) == list(first)
    )
    if not repeats:
        raise DataError(
            f"{where}: `{column}` begins with the turn {turns[0]!r:.60}, and `prompt` is {prompt!r:.60}",
            hint=f"give only the answers in `{column}`; for whole dialogues, set data.layout: pair",
        )
    return turns


def _pair(view: Mapping[str, Any], where: str) -> Preference:
    """Make a preference from full dialogues: lists of messages, or texts with `Human:` and `Assistant:`."""
    chosen, rejected = view["chosen"], view["rejected"]
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        return _of_turns({"chosen": chosen, "rejected": rejected}, view, where)
    ours, theirs = (_hh_dialogue(view, column, where) for column in _SIDES)
    _check_same_turns({"chosen": ours.conversation, "rejected": theirs.conversation}, where)
    if ours.prompt != theirs.prompt:
        raise DataError(
            f"{where}: the turns before the answers differ in white space: {ours.prompt!r:.60} in `chosen`, and "
            f"{theirs.prompt!r:.60} in `rejected`",
            hint="correct or remove the row",
        )
    return _preference([ours, theirs], view, where)


def _hh_dialogue(view: Mapping[str, Any], column: str, where: str) -> Completion:
    text = read_text(view, column, where)
    turns = hh_turns(text)
    if not turns or turns[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: `{column}` has no turns that end with an answer: {text!r:.60}",
            hint=columns_line(view, "prompt", "chosen", "rejected")
            or "give the prompt in a column `prompt`, or turns as lists of {role, content}, or as text after "
            "`\\n\\nHuman:` and `\\n\\nAssistant:`",
        )
    start = text.rindex("\n\nAssistant:") + len("\n\nAssistant:")
    return Completion(text[:start], text[start:], Conversation(tuple(turns)), has_all_turns=True)


def _alpaca_pair(view: Mapping[str, Any], where: str) -> Preference:
    sides = [read_alpaca({**view, "output": read_text(view, column, where)}, where) for column in _SIDES]
    return _preference(sides, view, where)


def _prompt_from(column: str, read: Callable[[Mapping[str, Any], str, str], object]) -> ReadPair:
    return lambda view, where: _prompt_pair({**view, "prompt": read(view, column, where)}, where)


def _response_pair(view: Mapping[str, Any], where: str) -> Preference:
    """Make a preference from the chosen dialogue in `messages` and a rejected answer to the last user turn."""
    chosen, rejected = _list_of_turns(view, "messages", where), view["rejected_response"]
    if isinstance(rejected, list | tuple):
        users = ("user", "human", "prompter")
        after_user = [number for number, turn in enumerate(chosen, start=1) if role_of(turn) in users]
        other = [*chosen[: max(after_user, default=0)], *rejected]
    else:
        other = [*chosen[:-1], *_as_turns(rejected, "rejected_response", where)]
    return _of_turns({"messages": chosen, "rejected_response": other}, view, where)


def _ranked_pair(view: Mapping[str, Any], where: str) -> Preference:
    """Prefer the answer with the best rank to the one with the worst; if all ranks are equal, the pair is dropped."""
    ranked = _ranked_answers(view["answers"], where)
    best, worst = (pick(ranked, key=operator.itemgetter(0))[1] for pick in (min, max))
    prompt = view["prompt"]
    if isinstance(prompt, str) and hh_turns(prompt):
        return _pair({**view, "chosen": prompt + best, "rejected": prompt + worst}, where)
    return _prompt_pair({**view, "chosen": best, "rejected": worst}, where)


def _ranked_answers(answers: object, where: str) -> list[tuple[float, str]]:
    hint = "give a list of {answer, rank}, where rank 1 is the best"
    if not isinstance(answers, list | tuple) or not answers:
        raise DataError(f"{where}: column `answers` is {shown_value(answers)}", hint=hint)
    ranked = []
    for number, answer in enumerate(answers, start=1):
        rank = answer.get("rank") if isinstance(answer, Mapping) else None
        if not isinstance(rank, int | float) or isinstance(rank, bool) or not math.isfinite(rank):
            raise DataError(f"{where}: answer {number} of `answers` has the rank {rank!r:.60}", hint=hint)
        ranked.append((float(rank), check_text(answer.get("answer"), f"{where}: answer {number} of `answers`")))
    return ranked


PAIR_LAYOUTS = by_name(
    (
        "messages_pair",
        "messages rejected_messages",
        "system tools margin",
        lambda view, where: _of_turns({key: view[key] for key in ("messages", "rejected_messages")}, view, where),
    ),
    ("response_pair", "messages rejected_response", "system tools margin", _response_pair),
    ("prompt_pair", "prompt chosen rejected", "system tools margin", _prompt_pair),
    ("question_pair", "question chosen rejected", "system margin", _prompt_from("question", read_text)),
    ("alpaca_pair", "instruction chosen rejected", "input system history margin", _alpaca_pair),
    (
        "sharegpt_pair",
        "conversations chosen rejected",
        "system tools margin",
        _prompt_from("conversations", _list_of_turns),
    ),
    ("chat_pair", "messages chosen rejected", "system tools margin", _chat_pair),
    ("pair", "chosen rejected", "system tools margin", _pair),
    ("ranked_pair", "prompt answers", "system tools margin", _ranked_pair),
)
"""Layouts of preference data by name, in the order in which they are tried."""
