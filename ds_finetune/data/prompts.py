"""Reads prompts for which the model samples answers, and the columns of their data rows, which rewards use.

If a row has a reference answer, as in supervised fine-tuning, it becomes the column `answer` of the prompt's record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ds_finetune.data.files import Record
from ds_finetune.data.messages import Conversation, read_conversation
from ds_finetune.data.record_layouts import LAYOUTS, Completion, LayoutColumns, Sample, by_name, is_answer
from ds_finetune.errors import DataError

ANSWER = "answer"
"""Column of a prompt's record that has the reference answer."""


@dataclass(frozen=True)
class Prompt:
    """A prompt for which the model samples answers: a dialogue without its answer, or a completion still empty."""

    sample: Conversation | Completion
    answer: object = None
    """Reference answer to the prompt; None if the data row has none."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the prompt's data row, with the reference answer in the column `answer`."""

    def with_system(self, text: str, where: str) -> Self:
        """Prepend a system message to the prompt."""
        return replace(self, sample=self.sample.with_system(text, where))

    def of_record(self, record: Record) -> Self:
        """Copy the prompt with all columns of its data row, and with the reference answer if there is one."""
        return replace(self, record={**record, **({} if self.answer is None else {ANSWER: self.answer})})


def _prompt_of(view: Mapping[str, Any], column: str, where: str) -> Prompt:
    value, answer = view[column], _reference(view)
    if isinstance(value, list | tuple):
        if value and is_answer(value[-1]):
            raise DataError(
                f"{where}: `{column}` ends with an assistant turn, {value[-1]!r:.60}, but the model writes the answer",
                hint=f"end `{column}` with the user's turn",
            )
        return Prompt(read_conversation(value, view.get("tools"), column, where), answer)
    sample = LAYOUTS["prompt_completion"].read({**view, "prompt": value, "completion": ""}, where)
    return _without_answer(sample, answer)


def _reference(view: Mapping[str, Any]) -> object:
    """Reference answer of a data row, from the columns of TRL and axolotl (`answer`, `solution`), ms-swift
    (`solution`), verl (`reward_model.ground_truth`), OpenRLHF (`label`), or of supervised fine-tuning (`completion`).
    """
    graded = view.get("reward_model")
    truth = graded.get("ground_truth") if isinstance(graded, Mapping) else None
    completion = view.get("completion")
    if isinstance(completion, list | tuple) and completion:
        last = completion[-1]
        completion = last.get("content", last.get("value")) if isinstance(last, Mapping) else None
    given = (view.get(ANSWER), view.get("solution"), truth, view.get("label"), completion)
    return next((value for value in given if value is not None), None)


def _without_answer(sample: Sample, answer: object) -> Prompt:
    """Make a prompt from a dialogue. A last assistant turn is removed, and is the answer if `answer` is None."""
    conversation = sample.conversation if isinstance(sample, Completion) else sample
    assert isinstance(conversation, Conversation)
    last = conversation.messages[-1]
    if last["role"] != "assistant":
        return Prompt(conversation, answer)
    prompt = replace(conversation, messages=conversation.messages[:-1])
    answer = (last["content"] or None) if answer is None else answer
    rest = replace(sample, completion="", conversation=prompt) if isinstance(sample, Completion) else prompt
    return Prompt(rest, answer)


def _dialogue(layout: str) -> tuple[str, str, str, Any]:
    """Make a layout of prompts from the dialogue layout of this name. A last assistant turn is the reference answer."""
    row = LAYOUTS[layout]

    def read(view: Mapping[str, Any], where: str) -> Prompt:
        needed = {name: view.get(name, "") for name in row.needed}
        return _without_answer(row.read({**view, **needed}, where), _reference({**view, "completion": None}))

    needed = " ".join(row.needed - {"output"})
    return layout, needed, " ".join({*row.optional, "output", ANSWER, "solution"} - {"system"}), read


PROMPT_LAYOUTS: Mapping[str, LayoutColumns] = by_name(
    (
        "prompt",
        "prompt",
        "answer solution completion reward_model label system history tools",
        lambda view, where: _prompt_of(view, "prompt", where),
    ),
    _dialogue("messages"),
    _dialogue("sharegpt"),
    _dialogue("alpaca"),
    ("input", "input", "answer label system tools", lambda view, where: _prompt_of(view, "input", where)),
)
