"""Counts of rows by name, each with the location of the first such row."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class NamedCounts:
    """For each name, the number of rows to which it applies and the location of the first (`file line 7`)."""

    entries: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str], where: str) -> Self:
        """The counts of one row, to which all `names` apply."""
        return cls({name: (1, where) for name in names})

    @classmethod
    def sum(cls, counts: Iterable[Self]) -> Self:
        """The sum; the location of a name is taken from the first of `counts` that has the name."""
        entries: dict[str, tuple[int, str]] = {}
        for one in counts:
            for name, (rows, where) in one.entries.items():
                before, first = entries.get(name, (0, where))
                entries[name] = (before + rows, first)
        return cls(entries)

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Self:
        """Counts that `dataclasses.asdict` wrote."""
        return cls({name: (rows, where) for name, (rows, where) in written["entries"].items()})

    def __add__(self, other: Self) -> Self:
        """The sum of both."""
        return self.sum([self, other])

    @property
    def rows(self) -> int:
        """The sum over all names."""
        return sum(rows for rows, _ in self.entries.values())
