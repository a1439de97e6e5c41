"""Named counts of rows, with where the first of them stands."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class NamedCounts:
    """How many rows each name applies to, and the first of them (`file line 7`)."""

    entries: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str], where: str) -> Self:
        """One row, once for each name."""
        return cls({name: (1, where) for name in names})

    @classmethod
    def sum(cls, tallies: Iterable[Self]) -> Self:
        """All of them, in order."""
        entries: dict[str, tuple[int, str]] = {}
        for tally in tallies:
            for name, (rows, where) in tally.entries.items():
                before, first = entries.get(name, (0, where))
                entries[name] = (before + rows, first)
        return cls(entries)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Self:
        """A tally that `dataclasses.asdict` wrote."""
        return cls({name: (rows, where) for name, (rows, where) in written["entries"].items()})

    def __add__(self, other: Self) -> Self:
        """Counts of both."""
        return self.sum([self, other])

    @property
    def rows(self) -> int:
        """Rows of all names."""
        return sum(rows for rows, _ in self.entries.values())
