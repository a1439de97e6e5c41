"""The built-in rewards, which score a sampled answer, most by comparing it with the reference answer of its data row.

All but `regex`, `format` and `length` read only the part of the answer after the reasoning. An answer from which no
result can be parsed gets the score of the option `unparsed`.
"""

import decimal
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.objectives.rewards.answers import (
    AnswerToScore,
    Outcome,
    RewardFaultError,
    begins_reasoning,
    final_part,
    last_box,
)
from ds_finetune.objectives.rewards.extractors import choice, last_number, plain_text
from ds_finetune.objectives.rewards.programs import read_tests, score_program

Settings = Mapping[str, Any]
"""Options of a reward by name, as in config.rewards.RewardConfig."""
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_EXACT = decimal.Context(prec=50, traps=[])


@dataclass(frozen=True)
class Builtin:
    """A built-in reward: how it scores answers and reads reference answers."""

    score: Callable[[AnswerToScore, Any, Settings], Outcome]
    """Function that scores an answer, given the reference answer as `read` has parsed it and the reward's options."""
    read: Callable[[Any], Any] | None = None
    """Function that parses the reference answer of a data row for `score`; RewardFaultError if that fails."""
    is_long_answers_fault: bool = False
    """Whether scoring that takes too long counts as a bad answer instead of an error of the reward function."""
    package: str = ""
    """Name of a module that must be installed for this reward; empty for none."""


def _unparsed(settings: Settings) -> Outcome:
    return Outcome(settings["unparsed"], has_result=False)


def _compared(result: object, is_right: bool, settings: Settings) -> Outcome:
    return _unparsed(settings) if result is None else Outcome(float(is_right), has_result=True, read=str(result))


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON value
    if isinstance(value, str | int | float) and str(value).strip():
        return str(value)
    raise RewardFaultError(f"is {type(value).__name__} {value!r:.60}, and should be a text or a number")


def _texts(value: Any) -> list[str]:  # noqa: ANN401 - any JSON value
    values = value if isinstance(value, list) and value else [value]
    return [plain_text(_text(each)) for each in values]


def _exact_match(answer: AnswerToScore, references: list[str], settings: Settings) -> Outcome:
    """Score 1 if the answer equals one of the references; a run of white space counts as one space."""
    text = plain_text(final_part(answer))
    change = str.casefold if settings["ignore_case"] else str
    return _compared(text or None, change(text) in map(change, references), settings)


def _read_number(value: Any) -> decimal.Decimal:  # noqa: ANN401 - any JSON value
    number = last_number(_text(value))
    if number is None:
        raise RewardFaultError(f"is {value!r:.60}, which has no number")
    return number


def _number(answer: AnswerToScore, reference: decimal.Decimal, settings: Settings) -> Outcome:
    """Score 1 if the answer's last number differs from the reference by at most `tolerance` x |reference|."""
    number = last_number(final_part(answer))
    if number is None:
        return _unparsed(settings)
    most = _EXACT.multiply(_EXACT.create_decimal(repr(settings["tolerance"])), _EXACT.abs(reference))
    distance = _EXACT.abs(_EXACT.subtract(number, reference))
    return _compared(f"{number:.12g}", _EXACT.compare(distance, most) <= 0, settings)


def _read_choice(value: Any) -> str:  # noqa: ANN401 - any JSON value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 26:
        return chr(ord("A") + value)
    letter = choice(_text(value))
    if letter is None:
        raise RewardFaultError(f"is {value!r:.60}, which has no letter of a choice")
    return letter


def _choice(answer: AnswerToScore, reference: str, settings: Settings) -> Outcome:
    """Score 1 if the answer's multiple-choice letter is that of the reference, which may be a number: 0 is A."""
    letter = choice(final_part(answer))
    return _compared(letter, letter == reference, settings)


def _regex(answer: AnswerToScore, _: object, settings: Settings) -> Outcome:
    return Outcome(float(bool(answer.text) and re.search(settings["pattern"], answer.text) is not None))


def _format(answer: AnswerToScore, _: object, settings: Settings) -> Outcome:
    """Score 1 if the text is `<think>` reasoning `</think>` answer, neither of them empty. The first tag may be missing
    if the prompt ends with it.
    """
    text = "<think>" * begins_reasoning(answer.prompt) + answer.text.strip()
    thought, end, rest = text.removeprefix("<think>").partition("</think>")
    if settings["answer_tag"]:
        is_enclosed = rest.strip().startswith("<answer>") and rest.strip().endswith("</answer>")
        rest = rest.strip().removeprefix("<answer>").removesuffix("</answer>") if is_enclosed else ""
    has_tag = any(tag in part for part in (thought, rest) for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    is_right = text.startswith("<think>") and bool(end and thought.strip() and rest.strip()) and not has_tag
    return Outcome(float(is_right))


def _length(answer: AnswerToScore, _: object, settings: Settings) -> Outcome:
    """Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13) for an answer of n tokens.

    With L = `max_tokens` and C = `soft_tokens`, the score is 0 for n <= L - C, ((L - C) - n) / C up to L, then -1.
    """
    tokens, most, soft = len(answer.ids), settings["max_tokens"], settings["soft_tokens"]
    if tokens <= most - soft:
        return Outcome(0.0)
    return Outcome((most - soft - tokens) / soft if tokens <= most else -1.0)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _parsed_json(text: str) -> Any:  # noqa: ANN401 - any JSON value
    fenced = _FENCED.findall(text)
    return json.loads(fenced[-1] if fenced else text, parse_constant=_no_constant)


def _read_json(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if not isinstance(value, str):
        return value
    try:
        return _parsed_json(value)
    except (ValueError, RecursionError):
        return value


def _json(answer: AnswerToScore, reference: Any, settings: Settings) -> Outcome:  # noqa: ANN401 - any JSON value
    """Score 1 if the answer is valid JSON or, with `column`, equals the reference value."""
    try:
        value = _parsed_json(final_part(answer))
        text = json.dumps(value)
    except (ValueError, RecursionError):
        return _unparsed(settings)
    return _compared(text, not settings["column"] or value == reference, settings)


def _math(answer: AnswerToScore, reference: str, settings: Settings) -> Outcome:
    r"""Score 1 if math-verify judges the answer's formula equal to the reference. The formula is read from the last
    `\\boxed{...}` if there is one.

    math-verify's own time limits are off, because they use the alarm signal that the worker process needs.
    """
    from math_verify import parse, verify

    gold = parse(reference, parsing_timeout=None) or parse(f"${reference}$", parsing_timeout=None)
    if not gold:
        raise RewardFaultError(f"has the reference answer {reference!r:.60}, in which math-verify finds no formula")
    text = final_part(answer)
    boxed = last_box(text)
    formula = parse(text if boxed is None else rf"\boxed{{{boxed}}}", parsing_timeout=None) if text else []
    is_right = bool(formula) and verify(gold, formula, timeout_seconds=None)
    return _compared(formula[0] if formula else None, is_right, settings)


def _code(answer: AnswerToScore, tests: Any, settings: Settings) -> Outcome:  # noqa: ANN401 - what read_tests makes
    """Score 1 if the program in the answer passes all tests of the data row; with `partial`, the fraction passed."""
    passed = score_program(final_part(answer), tests, timeout=settings["timeout"], memory=settings["memory"])
    if passed is None:
        return _unparsed(settings)
    return Outcome(passed if settings["partial"] else float(passed == 1), has_result=True)


BUILTIN: Mapping[str, Builtin] = {
    "exact_match": Builtin(_exact_match, _texts),
    "number": Builtin(_number, _read_number),
    "choice": Builtin(_choice, _read_choice),
    "regex": Builtin(_regex),
    "format": Builtin(_format),
    "length": Builtin(_length),
    "json": Builtin(_json, _read_json),
    "math": Builtin(_math, _text, is_long_answers_fault=True, package="math_verify"),
    "code": Builtin(_code, read_tests, is_long_answers_fault=True),
}
"""The built-in rewards by name; `config.rewards.OPTIONS` lists their options."""
