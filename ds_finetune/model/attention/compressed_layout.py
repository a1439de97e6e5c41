"""Index ranges of the tokens and compressed entries to which queries of DeepSeek-V4's attention attend in packed rows.

Rows are flattened, and entries of all documents are ordered by their tokens. So each query attends to a contiguous
range of tokens and of entries, and a block of queries is multiplied with the union of these ranges.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ds_finetune.model.attention.by_document import Documents

_LAYOUTS = 8
"""Number of cached layouts of packed rows. Layers with the same compression rate use the same layout."""
_CACHED_PAIRS = 2**20
"""Maximum number of query-key pairs of a boolean attention mask that is cached (1 MiB). Larger masks are recomputed."""


class RowShards(NamedTuple):
    """Lengths of the documents by row, number of sequence parallel shards of a row, and index of this rank's shard."""

    documents: tuple[Documents, ...]
    sp: int = 1
    rank: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of each row on one sequence parallel rank."""
        return sum(self.documents[0]) // self.sp

    def own(self, of_tokens: np.ndarray) -> np.ndarray:
        """This rank's elements of an array that has one element for each token of the flattened rows."""
        begin = self.rank * self.tokens
        return of_tokens.reshape(len(self.documents), -1)[:, begin : begin + self.tokens].reshape(-1)

    def local_indices(self, tokens: np.ndarray, before: int) -> np.ndarray:
        """Convert token indices of the flattened rows to indices into this rank's shards. Up to `before` tokens of
        earlier ranks precede each shard.
        """
        begin, (row, in_row) = self.rank * self.tokens, np.divmod(tokens, self.tokens * self.sp)
        before = min(before, begin)
        return row * (before + self.tokens) + in_row - begin + before


@dataclass(frozen=True, eq=False)
class Entries:
    """Which tokens each compressed entry averages, and which entries each token sees, as index tensors."""

    windows: torch.Tensor
    """Indices of the tokens of each compressed entry that this rank computes, int64 [own entries, rate]. If windows
    overlap, an entry also averages the `rate` tokens before these.
    """
    is_first: torch.Tensor
    positions: torch.Tensor
    """Position of each compressed entry's first token in its document, int64 [own entries]."""
    order: torch.Tensor
    """Index of each compressed entry in the all-gathered tensor, which has `most` entries per rank, int64 [entries]."""
    most: int
    first: torch.Tensor
    """For each token, index of the first compressed entry of its document, int64 [tokens]."""
    end: torch.Tensor
    """For each token, index after the last compressed entry that ends at or before the token, int64 [tokens]."""
    ranges: tuple[np.ndarray, np.ndarray]
    """The range of compressed entries that each token sees, from `first` to `end`, in host memory."""


@dataclass(frozen=True, eq=False)
class WindowTokens:
    """Index tensors of the tokens to which each token of this rank attends within the sliding window. Indices count
    this rank's tokens of each row and the tokens before them, received from earlier ranks.
    """

    own: torch.Tensor
    """Index of each token of this rank, int64 [tokens]. A token attends to no later ones."""
    first: torch.Tensor
    """For each token, the first token that it attends to: the start of its window or document, int64 [tokens]."""
    own_array: np.ndarray
    """`own` as a numpy array in host memory."""
    first_array: np.ndarray
    """`first` as a numpy array in host memory."""
    starts: np.ndarray
    """Start of each document among this rank's tokens, followed by the number of these tokens."""


def _begins(documents: tuple[Documents, ...]) -> np.ndarray:
    lengths = [length for row in documents for length in row]
    return np.repeat(np.cumsum([0, *lengths])[:-1], lengths)


@lru_cache(_LAYOUTS)
def tokens_of(shards: RowShards, window: int, device: torch.device) -> WindowTokens:
    """Index tensors of the tokens that each token of this rank sees: the last `window` of its document up to itself."""
    begins = _begins(shards.documents)
    first = np.maximum(begins, np.arange(len(begins)) - window + 1)
    own, seen = (shards.local_indices(shards.own(indices), window - 1) for indices in (np.arange(len(begins)), first))
    starts = np.flatnonzero(np.diff(shards.own(begins), prepend=-1, append=-1))
    return WindowTokens(torch.from_numpy(own).to(device), torch.from_numpy(seen).to(device), own, seen, starts)


@lru_cache(_LAYOUTS)
def entries_of(shards: RowShards, rate: int, before: int, device: torch.device) -> Entries:
    """Index tensors of the compressed entries of all documents, with `rate` tokens per entry. `before` is the number of
    tokens of earlier sequence parallel ranks before this rank's tokens.
    """
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
    parts = (shards.local_indices(windows[is_own], before), in_document[is_own] == 0, in_document[is_own] * rate, order)
    at, is_first, token_positions, order_of, first_of, end = (
        torch.from_numpy(part).to(device) for part in (*parts, *ranges)
    )
    return Entries(at, is_first, token_positions, order_of, int(made.max()), first_of, end, ranges)


@dataclass(eq=False)
class QueryBlock:
    """A block of queries, with the ranges of tokens and compressed entries that they attend to."""

    queries: slice
    tokens: slice
    entries: slice
    caches_mask: bool = False
    mask: torch.Tensor | None = None
    """Mask of the tokens and compressed entries that each query sees, bool [queries, keys]; None if not cached."""


@lru_cache(_LAYOUTS)
def blocks_of(
    tokens: WindowTokens, entries: Entries | None, topk: int, queries: int, pairs: int
) -> tuple[QueryBlock, ...]:
    """Split queries into blocks of at most `queries` queries. A block has queries of one document, or several complete
    documents. Blocks with more than `pairs` query-key products are split further. A block's keys start at the first
    token that any of its queries sees.
    """
    own, seen, stops = tokens.own_array, tokens.first_array, [0]
    for begin, stop in pairwise(tokens.starts.tolist()):
        if len(stops) > 1 and stop - stops[-2] <= queries:
            stops[-1] = stop
        else:
            times = -(-(stop - begin) // queries)
            stops += [begin + (stop - begin) * part // times for part in range(1, times + 1)]
    first, end = entries.ranges if entries is not None else (np.zeros(len(own), int),) * 2
    blocks, products = [], 0
    for begin, stop in pairwise(stops):
        while begin < stop:
            keys = int(own[stop - 1] - seen[begin]) + 1
            keys += min(int(end[stop - 1] - first[begin]), topk or len(own))
            last = begin + max(1, min(stop - begin, pairs // keys))
            window = slice(int(seen[begin]), int(own[last - 1]) + 1)
            blocks.append(QueryBlock(slice(begin, last), window, slice(int(first[begin]), int(end[last - 1]))))
            products += (last - begin) * keys
            begin = last
    for block in blocks:
        block.caches_mask = products <= _CACHED_PAIRS
    return tuple(blocks)
