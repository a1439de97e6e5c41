"""What a typical row of a run's data is: its tokens, the supervised ones, and the lengths of its documents."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class RowShape:
    """A row as it is computed."""

    num_tokens: int
    """With padding."""
    num_supervised: float
    documents: tuple[int, ...]
    """Their lengths; padding counts as a document."""

    @classmethod
    def full(cls, num_tokens: int, *, supervised_share: float = 1.0) -> Self:
        """One document as long as the row: what a plan assumes where it has read no data."""
        return cls(num_tokens, supervised_share * num_tokens, (num_tokens,))

    def pairs(self, limit: int | None) -> float:
        """Pairs of tokens of which one attends to the other, where a token attends to `limit` positions at most."""
        return sum(_pairs(length, limit) for length in self.documents)

    @property
    def mean_attended(self) -> float:
        """Positions that a token attends to on average, without a limit."""
        return self.pairs(None) / self.num_tokens


def _pairs(length: int, limit: int | None) -> float:
    if limit is None or length <= limit:
        return length**2 / 2
    return limit**2 / 2 + (length - limit) * limit
