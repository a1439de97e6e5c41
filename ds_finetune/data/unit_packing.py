"""Which units each row has: one, or as many as fit. A unit is one document, or the two documents of a pair."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ds_finetune.data.documents import Documents
from ds_finetune.data.packing import Numbers, pack
from ds_finetune.data.row_kind import RowKind


def one_unit_a_row(documents: Documents, kind: RowKind) -> tuple[Numbers, Numbers]:
    """`order` and `offsets` of `PreparedRows` where each unit is a row."""
    units = len(documents.targets) // max(kind.documents_per_unit, 1)
    return np.arange(units), np.arange(units + 1)


def pack_units(
    documents: Documents, kind: RowKind, max_seq_len: int, parts: Sequence[int] | None = None
) -> tuple[Numbers, Numbers]:
    """`order` and `offsets` of `PreparedRows` where rows of at most `max_seq_len` tokens are filled with units.

    `parts` are numbers of consecutive units; a row has units of one of them. Left out, there is one part.
    """
    lengths = np.diff(documents.offsets).reshape(-1, max(kind.documents_per_unit, 1)).sum(axis=1)
    starts = np.cumsum([0, *([len(lengths)] if parts is None else parts)]).tolist()
    rows = [row + start for start, end in pairwise(starts) for row in pack(lengths[start:end], max_seq_len)]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return np.concatenate(rows), offsets
