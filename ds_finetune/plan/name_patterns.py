"""Patterns of a run file that name modules or parameters of a model."""

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ds_finetune.errors import ConfigError

_SHOWN = 8


def matching(pattern: str, names: Mapping[str, Collection[str]], *, key: str, what: str) -> list[str]:
    """Names among `names` that `pattern` matches. `names` maps each full name to the texts that the pattern may match.
    A pattern that equals no text is a regular expression.

    ConfigError if the pattern is no regular expression, or matches nothing: then the hint has similar names. For the
    message, `key` is the run-file key of the pattern, and `what` says what it matches, such as "parameter".
    """
    matches = [name for name, own in names.items() if pattern in own]
    if not matches:
        try:
            expression = re.compile(pattern)
        except re.error as broken:
            raise ConfigError(
                f"{key} `{pattern}` is not a regular expression: {broken}",
                hint="write a regular expression of Python's module `re`",
            ) from broken
        matches = [name for name, own in names.items() if any(map(expression.fullmatch, own))]
    if not matches:
        short = sorted({name for own in names.values() for name in own if "." not in name})
        near = difflib.get_close_matches(pattern, [*short, *names], _SHOWN) or short
        full = next(iter(names))
        raise ConfigError(
            f"{key} `{pattern}` matches no {what}",
            hint=f"name one of {', '.join(near)}, or give a regular expression on full names such as {full}",
        )
    return matches


def parameter_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Full names of parameters, each with the names that patterns may use: its own, its module's, and the last parts of
    both.
    """
    modules = {name: name.rpartition(".")[0] for name in names}
    return {name: (name, module, last_part(module), last_part(name)) for name, module in modules.items()}


def patterns_of(names: Sequence[str]) -> str:
    """Parameter names with `*` for layer and expert numbers, each with the number of parameters that it stands for."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return ", ".join(f"{pattern} ({count})" if count > 1 else pattern for pattern, count in counts.items())


def last_part(name: str) -> str:
    """The part of a module's or parameter's full name behind the last dot."""
    return name.rpartition(".")[2]
