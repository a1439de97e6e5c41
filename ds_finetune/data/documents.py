"""Tokenised documents on disk: parts written one by one, each complete once it has its name."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ds_finetune.data.tally import Tally
from ds_finetune.data.template import Tokens


@dataclass(frozen=True)
class Counts:
    """What became of the rows that were read."""

    read: int = 0
    nothing_supervised: int = 0
    too_long_dropped: int = 0
    truncated: int = 0
    split: int = 0
    lead_differs: int = 0
    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    dropped: Tally = field(default_factory=Tally)
    """Rows left out for a reason of `reasons.DROPPED`."""
    noted: Tally = field(default_factory=Tally)
    """Rows of which something is to be reported (`reasons.NOTED`)."""
    unread: Tally = field(default_factory=Tally)
    """Columns and fields that nothing reads."""

    def __add__(self, other: Self) -> Self:
        """Counts of both."""
        return type(self)(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


@dataclass(frozen=True)
class Limits:
    """The longest document, and what happens to a longer one."""

    max_seq_len: int
    long_rows: str


@dataclass(frozen=True)
class Documents:
    """Documents end to end: `ids` int32 and `mask` bool [tokens], `offsets` int64 [documents + 1]."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """All documents of `parts`, in order."""
        lengths = [np.diff(part.offsets) for part in parts]
        return cls(
            ids=np.concatenate([part.ids for part in parts]),
            mask=np.concatenate([part.mask for part in parts]),
            offsets=np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64),
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Documents of a folder, mapped into memory rather than read."""
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "mask", "offsets")))

    def write(self, folder: Path, counts: Counts) -> None:
        """Write beside `folder` and rename, so that a folder that exists is whole."""
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        for name in ("ids", "mask", "offsets"):
            np.save(partial / f"{name}.npy", getattr(self, name))
        (partial / "counts.json").write_text(json.dumps(asdict(counts)), encoding="utf-8")
        partial.rename(folder)


def read_counts(folder: Path) -> Counts:
    """Counts written with a folder of documents."""
    written = json.loads((folder / "counts.json").read_text(encoding="utf-8"))
    return Counts(**{**written, **{name: Tally.read(written[name]) for name in ("dropped", "noted", "unread")}})


def gather(tokens: Sequence[Tokens], limits: Limits) -> tuple[Documents, Counts]:
    """Documents of at most `max_seq_len` tokens, each with something to learn, and what became of the others."""
    kept: list[tuple[list[int], list[bool]]] = []
    counts = Counts(read=len(tokens), lead_differs=sum(t.lead_differs for t in tokens))
    for document in tokens:
        if document.dropped:
            continue
        pieces, change = _fitted(document, limits)
        learnt = [(ids, mask) for ids, mask in pieces if any(mask[1:])]
        change += Counts(nothing_supervised=len(pieces) - len(learnt))
        kept += learnt
        counts += change
    lengths = [len(ids) for ids, _ in kept]
    found = Documents(
        ids=np.array([i for ids, _ in kept for i in ids], dtype=np.int32),
        mask=np.array([m for _, mask in kept for m in mask], dtype=np.bool_),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )
    supervised = sum(sum(mask[1:]) for _, mask in kept)
    return found, counts + Counts(documents=len(kept), tokens=len(found.ids), supervised=supervised)


def _fitted(document: Tokens, limits: Limits) -> tuple[list[tuple[list[int], list[bool]]], Counts]:
    ids, mask, size = document.ids, document.mask, limits.max_seq_len
    if len(ids) <= size:
        return [(ids, mask)], Counts()
    if limits.long_rows == "drop":
        return [], Counts(too_long_dropped=1)
    if limits.long_rows == "truncate":
        return [(ids[:size], mask[:size])], Counts(truncated=1)
    starts = range(0, len(ids), size)
    return [(ids[s : s + size], mask[s : s + size]) for s in starts], Counts(split=1)
