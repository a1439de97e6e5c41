"""The section `profile` of the run file: which steps are profiled, on which ranks."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator

from ds_finetune.config.section import Section

_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


def step_range(text: str) -> tuple[int, int]:
    """First and last step of `10-12`, or of `10` alone; ValueError where it is no range of steps from 1 on."""
    found = _STEPS.fullmatch(text.replace(" ", ""))
    if found is None:
        raise ValueError(f"`{text}` is not a range of steps; write `10-12`, or `10` for a single step")
    first, last = int(found[1]), int(found[2] or found[1])
    if first < 1:
        raise ValueError(f"`{text}` begins at step {first}, and steps count from 1")
    if last < first:
        raise ValueError(f"`{text}` ends at step {last} and begins at step {first}; write `{last}-{first}`")
    return first, last


def _check_steps(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("it should be a range of steps such as `10-12`, or one step")  # noqa: TRY004 - for pydantic
    step_range(str(value))
    return str(value)


def _as_ranks(value: object) -> object:
    if value == "all":
        return value
    ranks = value if isinstance(value, list | tuple) else [value]
    if not ranks or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks):
        raise ValueError("it should be `all`, a rank such as 0, or a list of ranks")
    return tuple(sorted(set(ranks)))


class ProfileConfig(Section):
    """Steps whose time is recorded and broken down (docs/how-to/timeline.md); left out, none are."""

    steps: Annotated[str, BeforeValidator(_check_steps)]
    """First and last step that are profiled, as in `10-12`, or a single step."""
    ranks: Annotated[Literal["all"] | tuple[int, ...], BeforeValidator(_as_ranks)] = "all"
    """Ranks that are profiled: `all`, one such as 0, or a list. Waits for the slowest rank are known only with all."""

    @property
    def first_and_last(self) -> tuple[int, int]:
        """The first and the last step that are profiled."""
        return step_range(self.steps)
