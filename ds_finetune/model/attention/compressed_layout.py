"""The tokens and entries that queries of DeepSeek-V4's attention see: of packed rows, on sequence parallel ranks.

Rows are flattened, and the entries of all documents are in the order of their tokens: a query attends to a range of
tokens and in a range of entries, with which some queries at a time are compared.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ds_finetune.model.attention.by_document import Documents

_LAYOUTS = 8
"""Layouts of documents that are kept: those of a forward by compression rate, for all of its layers."""
_KEPT_PAIRS = 2**20
"""Pairs of queries and keys of which a layout keeps, in 1 MiB, which are seen; those of more are computed by layer."""


class RowShards(NamedTuple):
    """The documents of rows, and which of the equal shards of each row this rank has."""

    documents: tuple[Documents, ...]
    sp: int = 1
    rank: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a row on a rank."""
        return sum(self.documents[0]) // self.sp

    def own(self, of_tokens: np.ndarray) -> np.ndarray:
        """What belongs to this rank's tokens, of an array with something for each token of the flattened rows."""
        begin = self.rank * self.tokens
        return of_tokens.reshape(len(self.documents), -1)[:, begin : begin + self.tokens].reshape(-1)

    def places(self, tokens: np.ndarray, before: int) -> np.ndarray:
        """Where some of the flattened rows' tokens are, after `before` tokens of earlier ranks in front of each row's
        shard, or all where there are fewer.
        """
        begin, (row, in_row) = self.rank * self.tokens, np.divmod(tokens, self.tokens * self.sp)
        before = min(before, begin)
        return row * (before + self.tokens) + in_row - begin + before


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of documents whose rows are flattened, and what each of this rank's tokens sees of them."""

    windows: torch.Tensor
    """Tokens of the window of each entry that this rank makes, int64 [own entries, rate]; those of the windows before
    are `rate` places earlier.
    """
    is_first: torch.Tensor
    """Whether an entry is the first of its document, bool [own entries]."""
    positions: torch.Tensor
    """The position in its document of the first token of each entry's window, int64 [own entries]."""
    order: torch.Tensor
    """Where each entry is among those of all ranks, of which each gives `most`, int64 [entries]."""
    most: int
    first: torch.Tensor
    """The first entry of each token's document, int64 [tokens]."""
    end: torch.Tensor
    """One past the last entry that each token sees: those whose windows end at it or before, int64 [tokens]."""
    ranges: tuple[np.ndarray, np.ndarray]
    """`first` and `end` in host memory."""


@dataclass(frozen=True, eq=False)
class SeenTokens:
    """What each of this rank's tokens sees of them and those before."""

    own: torch.Tensor
    """The token itself, int64 [tokens]."""
    first: torch.Tensor
    """The first token that it sees: a window's, or its document's; int64 [tokens]."""
    places: np.ndarray
    """`own` in host memory."""
    begins: np.ndarray
    """`first` in host memory."""
    starts: np.ndarray
    """The first of this rank's tokens of each document, and how many tokens it has."""


def _begins(documents: tuple[Documents, ...]) -> np.ndarray:
    """The first token of the document of each token of flattened rows."""
    lengths = [length for row in documents for length in row]
    return np.repeat(np.cumsum([0, *lengths])[:-1], lengths)


@lru_cache(_LAYOUTS)
def tokens_of(shards: RowShards, window: int, device: torch.device) -> SeenTokens:
    """What tokens see of rows, each of up to `window` tokens."""
    begins = _begins(shards.documents)
    first = np.maximum(begins, np.arange(len(begins)) - window + 1)
    own, seen = (shards.places(shards.own(of), window - 1) for of in (np.arange(len(begins)), first))
    starts = np.flatnonzero(np.diff(shards.own(begins), prepend=-1, append=-1))
    return SeenTokens(torch.from_numpy(own).to(device), torch.from_numpy(seen).to(device), own, seen, starts)


@lru_cache(_LAYOUTS)
def entries_of(shards: RowShards, rate: int, before: int, device: torch.device) -> Entries:
    """The entries of documents, each for `rate` tokens, where each rank has `before` tokens of those before its own."""
    sizes = np.array([length for row in shards.documents for length in row], dtype=np.int64)
    begins, number = np.cumsum(sizes) - sizes, sizes // rate
    first_entries = np.cumsum(number) - number
    in_document = np.arange(number.sum()) - np.repeat(first_entries, number)
    windows = np.repeat(begins, number)[:, None] + in_document[:, None] * rate + np.arange(rate)
    maker = windows[:, -1] // shards.tokens % shards.sp
    made = np.bincount(maker, minlength=shards.sp)
    order = np.empty_like(maker)
    for rank in range(shards.sp):
        order[maker == rank] = rank * made.max() + np.arange(made[rank])
    own = maker == shards.rank
    first, positions = np.repeat(first_entries, sizes), np.arange(sizes.sum()) - _begins(shards.documents)
    ranges = shards.own(first), shards.own(first + (positions + 1) // rate)
    parts = (shards.places(windows[own], before), in_document[own] == 0, in_document[own] * rate, order)
    at, is_first, places, order_of, first_of, end = (torch.from_numpy(part).to(device) for part in (*parts, *ranges))
    return Entries(at, is_first, places, order_of, int(made.max()), first_of, end, ranges)


@dataclass(eq=False)
class QueryPart:
    """Some queries, and the tokens and entries that any of them may see."""

    queries: slice
    tokens: slice
    entries: slice
    keeps_seen: bool = False
    seen: torch.Tensor | None = None
    """Which of `tokens` and `entries` each query sees, bool [queries, keys], where it is kept and has been computed."""


@lru_cache(_LAYOUTS)
def parts_of(tokens: SeenTokens, entries: Entries | None, topk: int, queries: int, pairs: int) -> tuple[QueryPart, ...]:
    """All queries, up to `queries` of a document or of several whole ones at a time, and fewer where they have more
    than `pairs` with keys; with the tokens from the first that one of them sees.
    """
    own, seen, stops = tokens.places, tokens.begins, [0]
    for begin, stop in pairwise(tokens.starts.tolist()):
        if len(stops) > 1 and stop - stops[-2] <= queries:
            stops[-1] = stop
        else:
            times = -(-(stop - begin) // queries)
            stops += [begin + (stop - begin) * part // times for part in range(1, times + 1)]
    first, end = entries.ranges if entries is not None else (np.zeros(len(own), int),) * 2
    parts, products = [], 0
    for begin, stop in pairwise(stops):
        while begin < stop:
            keys = int(own[stop - 1] - seen[begin]) + 1
            keys += min(int(end[stop - 1] - first[begin]), topk or len(own))
            last = begin + max(1, min(stop - begin, pairs // keys))
            of_tokens = slice(int(seen[begin]), int(own[last - 1]) + 1)
            parts.append(QueryPart(slice(begin, last), of_tokens, slice(int(first[begin]), int(end[last - 1]))))
            products += (last - begin) * keys
            begin = last
    for part in parts:
        part.keeps_seen = products <= _KEPT_PAIRS
    return tuple(parts)
