"""Writes the keys of nested sections as dotted keys such as `optim.lr`."""

from collections.abc import Iterator, Mapping
from typing import Any


def values_by_key(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested sections to `{dotted key: value}`; an empty section is kept as the value `{}`."""
    return dict(_leaves(tree, ""))


def set_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested sections to `{dotted key: value}`, leaving out None and empty sections."""
    return {key: value for key, value in _leaves(tree, "") if value is not None and value != {}}


def _leaves(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
