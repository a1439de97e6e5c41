"""The base of all sections of the run file."""

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the run file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def short_form(key: str) -> Callable[[object], object]:
    """A validator that reads a text as a section of which `key` alone is given."""
    return lambda value: {key: value} if isinstance(value, str) else value
