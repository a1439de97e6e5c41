"""One collective, as every rank that shares it knows it."""

from typing import NamedTuple


class CollectiveCall(NamedTuple):
    """One collective of a rank: its function, elements given, the ranks that share it, and its number among theirs,
    from 1.
    """

    name: str
    size: int
    ranks: str
    number: int

    def __str__(self) -> str:
        """For people."""
        return (
            f"{self.name}"
            + (f" of {self.size:,} elements" if self.size else "")
            + f" (number {self.number:,} of {self.ranks})"
        )

    @property
    def kind(self) -> tuple[str, int]:
        """What must be the same on every rank that takes part."""
        return self.name, self.size
