"""Sections of the rewards of a run: built-in rewards or functions in Python files, with weights and options."""

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ds_finetune.config.sections import Section, short_form
from ds_finetune.config.units import parse_bytes
from ds_finetune.config.value_types import SET_NAME, as_list, checked

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "exact_match": ("column", "ignore_case", "unparsed"),
    "number": ("column", "tolerance", "unparsed"),
    "choice": ("column", "unparsed"),
    "regex": ("pattern",),
    "format": ("answer_tag",),
    "length": ("max_tokens", "soft_tokens"),
    "json": ("column", "unparsed"),
    "math": ("column", "unparsed"),
    "code": ("column", "partial", "unparsed"),
}
"""Options that each built-in reward has besides those that all rewards have."""
_NEEDED = {"regex": "pattern", "length": "max_tokens"}
_COLUMNS = {"code": "tests", "json": ""}
"""Data column that each of these built-in rewards reads by default; other built-in rewards read `answer`."""
_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")


class RewardConfig(Section):
    """A reward: a function that scores an answer. `NAME` is short for `{reward: NAME}`."""

    reward: str
    """Name of a built-in reward, or a function of a Python file as `file.py:function`."""
    name: str | None = None
    """Name of the reward in metrics and tables; left out, the built-in reward's or function's own name."""
    weight: float = 1.0
    """Factor of the reward's scores in the sum of all rewards; with 0 the reward is only reported."""
    timeout: float = Field(default=30.0, gt=0)
    """Maximum seconds for scoring an answer. When they are exceeded, `math` and `code` give the score `unparsed`; other
    rewards end the run with an error.
    """
    memory: Annotated[str, checked(partial(parse_bytes, name="memory of a reward"))] = "4GB"
    """Memory limit of the reward's process, and of each program that `code` runs."""
    workers: int = Field(default=0, ge=0)
    """Number of processes per rank that score answers. For several rewards, the largest value counts. 0 divides
    a machine's cores among its ranks.
    """
    column: str | None = None
    """Data column with the reference answer (default `answer`); `code` reads the one with the tests (default `tests`).
    `extra.answer` names a key inside a mapping. Without a column, `json` accepts any JSON.
    """
    unparsed: float = 0.0
    """Score of an answer in which a reward finds no result, e.g. an empty answer or one with unfinished reasoning."""
    ignore_case: bool = False
    """For `exact_match`: whether to ignore differences of upper and lower case."""
    tolerance: float = Field(default=0.0, ge=0)
    """For `number`: largest accepted difference from the reference answer, relative to it."""
    pattern: str | None = None
    """For `regex`: regular expression that is searched in the answer."""
    answer_tag: bool = False
    """For `format`: whether `<answer>` and `</answer>` must enclose all text after the reasoning."""
    max_tokens: int | None = Field(default=None, ge=1)
    """For `length`: number of tokens above which the score of an answer is -1."""
    soft_tokens: int = Field(default=0, ge=0)
    """For `length`: number of tokens before `max_tokens` over which the score falls from 0 to -1."""
    partial: bool = False
    """For `code`: whether the score is the fraction of tests that pass, instead of 1 if all pass and else 0."""

    @model_validator(mode="before")
    @classmethod
    def _of_name(cls, value: object) -> object:
        return short_form("reward")(value)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if not self.is_builtin and not _FUNCTION.fullmatch(self.reward):
            near = difflib.get_close_matches(self.reward, OPTIONS, n=1)
            meant = f"did you mean `{near[0]}`? " if near else ""
            raise ValueError(f"`{self.reward}` is no reward; {meant}write `file.py:function`, or {', '.join(OPTIONS)}")
        own = OPTIONS.get(self.reward, ())
        all_options = {option for options in OPTIONS.values() for option in options}
        for option in sorted(all_options & self.model_fields_set - set(own)):
            if getattr(self, option) != type(self).model_fields[option].default:
                owners = ", ".join(name for name, options in OPTIONS.items() if option in options)
                has = f"has {', '.join(own)}" if own else "has no options"
                raise ValueError(f"`{option}` is an option of {owners}; `{self.reward}` {has}")
        self._check_values()
        return self

    def _check_values(self) -> None:
        needed = _NEEDED.get(self.reward)
        if needed and getattr(self, needed) is None:
            raise ValueError(f"`{self.reward}` needs `{needed}`")
        if self.soft_tokens > (self.max_tokens or 0):
            raise ValueError(f"`soft_tokens` {self.soft_tokens} is more than `max_tokens` {self.max_tokens}")
        if self.name is not None and not SET_NAME.fullmatch(self.name):
            raise ValueError(f"the name `{self.name}` may have only letters, digits, `_`, `-` and `.`")
        try:
            re.compile(self.pattern or "")
        except re.error as wrong:
            raise ValueError(f"`pattern` {self.pattern!r} is no regular expression: {wrong}") from None

    @property
    def is_builtin(self) -> bool:
        """Whether the reward is built in."""
        return self.reward in OPTIONS

    @property
    def shown_name(self) -> str:
        """Name of the reward in metrics and tables."""
        return self.name or self.reward.rpartition(":")[2]

    @property
    def file(self) -> str | None:
        """Python file that defines the reward; None for a built-in one."""
        return None if self.is_builtin else self.reward.rpartition(":")[0]

    @property
    def read_column(self) -> str:
        """Data column that the reward reads; empty for a function and for a built-in reward that reads none."""
        return self.column or _COLUMNS.get(self.reward, "answer") if "column" in OPTIONS.get(self.reward, ()) else ""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that are passed to the reward's process."""
        return self.model_dump() | {
            "name": self.shown_name,
            "column": self.read_column,
            "memory": parse_bytes(self.memory, name="memory"),
        }


def _check_rewards(rewards: Sequence[RewardConfig]) -> Sequence[RewardConfig]:
    names = [reward.shown_name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two rewards have the name `{name}`; give one of them another `name`")
    if rewards and not any(reward.weight for reward in rewards):
        raise ValueError("the weight of every reward is 0, so that nothing is trained; give one a weight")
    return rewards


RewardList = Annotated[tuple[RewardConfig, ...], BeforeValidator(as_list), AfterValidator(_check_rewards)]
"""Type of `rewards` in the run file: a list of rewards, or the name of a single reward."""
