"""Errors for a run file whose keys or values do not fit the schema."""

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ds_finetune.errors import ConfigError
from ds_finetune.run_file import Lines


def explain(invalid: ValidationError, root: type[BaseModel], source: str, lines: Lines) -> ConfigError:
    """The error for values that do not fit the tree of sections below `root`: each key with its line and the nearest legal name."""
    errors = [_explain_one(error, root, source, lines) for error in invalid.errors()]
    return ConfigError("; ".join(message for message, _ in errors), hint="; ".join(dict.fromkeys(hint for _, hint in errors)))


def _explain_one(error: Any, root: type[BaseModel], source: str, lines: Lines) -> tuple[str, str]:  # noqa: ANN401 - pydantic's ErrorDetails
    path = tuple(str(part) for part in error["loc"] if not isinstance(part, int))
    line = lines.get(path)
    where = f"{source} line {line}" if line else source
    name = ".".join(path)
    if error["type"] == "extra_forbidden":
        known = list(_field_names(root, path[:-1]))
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.4)
        return f"{where}: unknown key `{name}`", f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
    if error["type"] == "missing":
        return f"{where}: `{name}` is missing", f"add `{name}` to the run file"
    return f"{where}: `{name}` is {error['input']!r}: {_plain(error['msg'])}", "see `ds-finetune config schema`"


def _plain(message: str) -> str:
    return message.removeprefix("Value error, ").removeprefix("Input should be ")


def _field_names(root: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    section = root
    for key in path:
        field = next(f for n, f in section.model_fields.items() if key in (n, f.alias))
        kinds = (field.annotation, *get_args(field.annotation))
        section = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    for name, field in section.model_fields.items():
        yield field.alias or name
