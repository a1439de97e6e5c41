"""One call of a collective, numbered alike on every rank that shares it."""

from typing import NamedTuple


class CollectiveCall(NamedTuple):
    """Name of the function, elements that the rank passes in (0: objects, or none), the ranks that share it, and the
    number of the call among those ranks, from 1.
    """

    name: str
    size: int
    ranks: str
    number: int

    def __str__(self) -> str:
        """For people."""
        size = f" of {self.size:,} elements" if self.size else ""
        return f"{self.name}{size} (number {self.number:,} of {self.ranks})"

    @property
    def signature(self) -> tuple[str, int]:
        """What must be the same on every rank that takes part."""
        return self.name, self.size
