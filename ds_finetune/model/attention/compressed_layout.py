"""Index ranges of the tokens and entries that queries of DeepSeek-V4's attention may attend to, for packed rows and
sequence parallel ranks.

Rows are flattened, and the entries of all documents are in the order of their tokens. So each query attends to a
contiguous range of tokens and of entries, and a block of queries is multiplied with the union of their ranges.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ds_finetune.model.attention.by_document import Documents

_LAYOUTS = 8
"""Size of the caches of layouts: the layers of a forward share one layout per compression rate."""
_KEPT_PAIRS = 2**20
"""Maximum number of query-key pairs for which a layout keeps its boolean mask (1 MiB); others are recomputed."""


class RowShards(NamedTuple):
    """The lengths of the documents of each row, the number of equal shards of a row, and this rank's shard."""

    documents: tuple[Documents, ...]
    sp: int = 1
    rank: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of a row on each rank."""
        return sum(self.documents[0]) // self.sp

    def own(self, of_tokens: np.ndarray) -> np.ndarray:
        """The elements of this rank's tokens, from an array with one element per token of the flattened rows."""
        begin = self.rank * self.tokens
        return of_tokens.reshape(len(self.documents), -1)[:, begin : begin + self.tokens].reshape(-1)

    def places(self, tokens: np.ndarray, before: int) -> np.ndarray:
        """Indices of tokens of the flattened rows within this rank's shards. Each shard is preceded by `before` tokens
        of earlier ranks, or all of them where there are fewer.
        """
        begin, (row, in_row) = self.rank * self.tokens, np.divmod(tokens, self.tokens * self.sp)
        before = min(before, begin)
        return row * (before + self.tokens) + in_row - begin + before


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of the documents of flattened rows, and the entries that each token of this rank may attend to."""

    windows: torch.Tensor
    """Indices of the tokens of each entry that this rank computes, int64 [own entries, rate]; the preceding window is
    `rate` tokens earlier.
    """
    is_first: torch.Tensor
    """Whether an entry is the first of its document, bool [own entries]."""
    positions: torch.Tensor
    """The position in its document of the first token of each entry's window, int64 [own entries]."""
    order: torch.Tensor
    """Index of each entry in the all-gathered tensor, which has `most` entries of each rank, int64 [entries]."""
    most: int
    first: torch.Tensor
    """The first entry of each token's document, int64 [tokens]."""
    end: torch.Tensor
    """One past the last entry whose window ends at the token or before, int64 [tokens]."""
    ranges: tuple[np.ndarray, np.ndarray]
    """`first` and `end` as numpy arrays in host memory."""


@dataclass(frozen=True, eq=False)
class SeenTokens:
    """For each token of this rank, the range of tokens that it attends to within the window, as indices into its shards
    with their preceding tokens.
    """

    own: torch.Tensor
    """Index of the token itself, which is the last it attends to, int64 [tokens]."""
    first: torch.Tensor
    """First token that it attends to: the start of the window or of the document, int64 [tokens]."""
    places: np.ndarray
    """`own` as a numpy array in host memory."""
    begins: np.ndarray
    """`first` as a numpy array in host memory."""
    starts: np.ndarray
    """Where each document begins among this rank's tokens, and last the number of these tokens."""


def _begins(documents: tuple[Documents, ...]) -> np.ndarray:
    """Index of the first token of its document, for each token of the flattened rows."""
    lengths = [length for row in documents for length in row]
    return np.repeat(np.cumsum([0, *lengths])[:-1], lengths)


@lru_cache(_LAYOUTS)
def tokens_of(shards: RowShards, window: int, device: torch.device) -> SeenTokens:
    """The range of up to `window` tokens that each token attends to."""
    begins = _begins(shards.documents)
    first = np.maximum(begins, np.arange(len(begins)) - window + 1)
    own, seen = (shards.places(shards.own(of), window - 1) for of in (np.arange(len(begins)), first))
    starts = np.flatnonzero(np.diff(shards.own(begins), prepend=-1, append=-1))
    return SeenTokens(torch.from_numpy(own).to(device), torch.from_numpy(seen).to(device), own, seen, starts)


@lru_cache(_LAYOUTS)
def entries_of(shards: RowShards, rate: int, before: int, device: torch.device) -> Entries:
    """The entries of documents, each for `rate` tokens; `before` is the number of preceding tokens on each rank."""
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
    is_own = maker == shards.rank
    first, positions = np.repeat(first_entries, sizes), np.arange(sizes.sum()) - _begins(shards.documents)
    ranges = shards.own(first), shards.own(first + (positions + 1) // rate)
    parts = (shards.places(windows[is_own], before), in_document[is_own] == 0, in_document[is_own] * rate, order)
    at, is_first, places, order_of, first_of, end = (torch.from_numpy(part).to(device) for part in (*parts, *ranges))
    return Entries(at, is_first, places, order_of, int(made.max()), first_of, end, ranges)


@dataclass(eq=False)
class QueryPart:
    """A block of queries, and the range of tokens and entries that any of them may attend to."""

    queries: slice
    tokens: slice
    entries: slice
    keeps_seen: bool = False
    seen: torch.Tensor | None = None
    """Mask of `tokens` and `entries` by query, bool [queries, keys], once computed and where it is kept."""


@lru_cache(_LAYOUTS)
def parts_of(tokens: SeenTokens, entries: Entries | None, topk: int, queries: int, pairs: int) -> tuple[QueryPart, ...]:
    """Blocks of queries: at most `queries` of one document, or several whole documents, and fewer where a block would
    have more than `pairs` query-key products. The tokens of a block start with the first that one of its queries
    attends to.
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
