"""Input and output of reward functions: an answer with its data row, and the outcome of scoring it.

Worker processes import this module, so it imports only the standard library.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_ANSWER_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class AnswerToScore:
    """A sampled answer, with everything that a reward function may read."""

    record: Mapping[str, Any]
    """The data row of the prompt. A reference answer is in the column `answer`."""
    prompt: str
    """The text of the prompt, with its control tokens."""
    text: str
    """Text of the answer before its end token."""
    ids: Sequence[int]
    """Token ids of the answer, including the end token if the model ended the answer."""
    finish: str
    """`stop` if the model ended the answer, `length` if the token limit cut it."""
    where: str
    """Name of the answer for error messages, such as `train.jsonl line 7, answer 3`."""


class Outcome(NamedTuple):
    """What a reward function returns for one answer."""

    score: float | None
    """Score of the answer; None if the reward is not applicable."""
    has_result: bool | None = None
    """Whether a result, such as a number, could be parsed from the answer; None for rewards that parse nothing."""
    read: str = ""
    """The result that was parsed from the answer, as `ds-finetune rewards` shows it."""


class RewardFaultError(Exception):
    """The reward function or the data row is at fault, not the answer; the exception's argument is the reason."""


def final_part(answer: AnswerToScore) -> str:
    """The part of an answer after its reasoning, or the content of the last `<answer>` tag in that part. Empty if the
    reasoning, which may begin in the prompt, does not end.
    """
    _, end, text = answer.text.rpartition("</think>")
    if not end and ("<think>" in answer.text or begins_reasoning(answer.prompt)):
        return ""
    tagged = _ANSWER_TAGS.findall(text)
    return (tagged[-1] if tagged else text).strip()


def begins_reasoning(prompt: str) -> bool:
    """Whether the prompt ends with an open `<think>`, as from R1's chat template."""
    return prompt.rstrip().endswith("<think>")


def last_box(text: str) -> str | None:
    r"""Content of the last `\\boxed{...}` in a text; None if there is none, or if it is not closed."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len(r"\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start + len(r"\boxed{") : end]
    return None


def column_of(record: Mapping[str, Any], column: str) -> object:
    """Value of a column of a data row; None if it is missing. `a.b` is the key `b` of the mapping in column `a`."""
    if column in record:
        return record[column]
    outer, dot, inner = column.partition(".")
    branch = record.get(outer)
    return column_of(branch, inner) if dot and isinstance(branch, Mapping) else None
