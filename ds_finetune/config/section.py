"""The base of all sections of the run file."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the run file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
