"""One call of a collective; the ranks that take part give it the same number."""

from typing import NamedTuple


class CollectiveCall(NamedTuple):
    """A call of the function `name` with `size` elements as input (0: objects, or no input).

    `ranks` are the ranks that take part. `number` counts the calls among these ranks, from 1.
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
