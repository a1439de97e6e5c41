"""Stores tokenised documents on disk, with counts of the data rows from which they were made.

Documents are written in parts. A part is complete as soon as its folder has its final name.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from ds_finetune.data.cache import ArrayParts, write_folder


@dataclass(frozen=True)
class NamedCounts:
    """Counts of data rows by name, e.g. by reason to drop them, each with the location of its first row."""

    entries: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[tuple[Iterable[str], str]]) -> Self:
        """Count data rows by name. `rows` gives for each row the names that apply to it, and its location."""
        entries: dict[str, tuple[int, str]] = {}
        for names, where in rows:
            for name in names:
                number, first = entries.get(name, (0, where))
                entries[name] = (number + 1, first)
        return cls(entries)

    def __add__(self, other: Self) -> Self:
        entries = dict(self.entries)
        for name, (rows, where) in other.entries.items():
            before, first = entries.get(name, (0, where))
            entries[name] = (before + rows, first)
        return type(self)(entries)

    @property
    def rows(self) -> int:
        """Number of data rows counted, summed over all names."""
        return sum(rows for rows, _ in self.entries.values())


_ARRAYS = {
    "ids": np.dtype(np.int32),
    "mask": np.dtype(np.bool_),
    "offsets": np.dtype(np.int64),
    "digests": np.dtype(np.uint64),
    "targets": np.dtype(np.float64),
    "second": np.dtype(np.int32),
    "records": np.dtype(np.uint8),
    "places": np.dtype(np.uint8),
}
DOCUMENT_ARRAYS = ("ids", "mask", "offsets", "digests", "targets", "second")
PROMPT_ARRAYS = (*DOCUMENT_ARRAYS, "records")
TOKEN_ARRAYS = ("ids", "mask", "offsets", "digests")


BAD_ROWS_SHOWN = 20


class TokenisedDocument(NamedTuple):
    """A tokenised document to be written, with the fields of `Documents`. Without a second text, `second` is None."""

    ids: Sequence[int]
    mask: Sequence[bool]
    target: float = 0.0
    second: int | None = None
    record: str = ""
    """Columns of the document's data row as JSON; empty unless rewards need them."""
    where: str = ""


@dataclass(frozen=True)
class Counts:
    """Numbers of data rows read, dropped, truncated and split, and of the documents and tokens made from them."""

    read: int = 0
    nothing_supervised: int = 0
    too_long_dropped: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0
    server_prompt_differs: int = 0
    """Number of data rows whose tokenised prompt differs from the prompt that a server makes of the row's messages."""
    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    dropped: NamedCounts = field(default_factory=NamedCounts)
    """Numbers of dropped data rows by reason, which is a key of `row_report.DROPPED`."""
    noted: NamedCounts = field(default_factory=NamedCounts)
    """Numbers of trained data rows by remark, a key of `row_report.NOTED` such as an empty answer."""
    unread: NamedCounts = field(default_factory=NamedCounts)
    """Numbers of data rows by name of a column or message field that training does not use."""
    forms: NamedCounts = field(default_factory=NamedCounts)
    """Numbers of completions without a chat template by the form of their prompt: `alpaca`, `separator` or `joined`."""
    named: NamedCounts = field(default_factory=NamedCounts)
    """For each key of `data.columns`: number of data rows that have the column assigned to the key."""
    by_path: NamedCounts = field(default_factory=NamedCounts)
    """Numbers of documents by index of their path in data.train or data.eval; empty for a single path."""

    bad_rows: int = 0
    bad: tuple[str, ...] = ()
    """Error messages of data rows that cannot be read, at most `BAD_ROWS_SHOWN` for each part of the data."""
    long_prompts: tuple[tuple[int, str], ...] = ()
    """For each prompt that leaves too few tokens for an answer: tokens over the limit, and its location."""

    def __add__(self, other: Self) -> Self:
        names = (field.name for field in fields(self))
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def truncated_ratio(self) -> float:
        """Fraction of all tokens that truncation cut off."""
        return self.truncated_tokens / max(self.tokens + self.truncated_tokens, 1)


@dataclass(frozen=True)
class LengthLimit:
    """Maximum tokens of a document, and the rule for longer ones; `auto` splits plain text and truncates dialogue."""

    max_seq_len: int
    long_rows: str

    def rule(self, *, is_text: bool) -> str:
        """Rule for a document beyond the limit: `truncate`, `drop` or `split`."""
        if self.long_rows == "auto":
            return "split" if is_text else "truncate"
        return self.long_rows


@dataclass(frozen=True)
class Documents:
    """Tokenised documents, concatenated: `ids` int32 and `mask` bool [tokens], `offsets` int64 [documents + 1].

    `digests` uint64 [documents] are hashes of each document's ids. `targets` float64 [documents] are class indices,
    ratings, margins of pairs, or 1 and 0 for good and bad answers. `second` int32 [documents] is the index of the
    second text's first token in a document of two texts, else the document's length. `records` and `places` uint8 are
    UTF-8 text with a line for each document: the columns of its data row as JSON, and the location of the row. Both are
    empty unless rows are prompts.
    """

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    digests: NDArray[np.uint64]
    targets: NDArray[np.float64]
    second: NDArray[np.int32]
    records: NDArray[np.uint8]
    places: NDArray[np.uint8]

    @classmethod
    def of(cls, documents: Sequence[TokenisedDocument]) -> Self:
        """Concatenate a list of tokenised documents."""
        lengths = [len(document.ids) for document in documents]
        ids = np.array([i for document in documents for i in document.ids], dtype=np.int32)
        mask = np.array([m for document in documents for m in document.mask], dtype=np.bool_)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        targets = np.array([document.target for document in documents], dtype=np.float64)
        second = [length if d.second is None else d.second for d, length in zip(documents, lengths, strict=True)]
        # On disk, `records` and `places` have one line per document, or are empty if all lines would be empty.
        texts = [[document.record for document in documents], [document.where for document in documents]]
        lines = ["".join(f"{text}\n" for text in each) if any(each) else "" for each in texts]
        records, places = (np.frombuffer(each.encode(), dtype=np.uint8) for each in lines)
        seconds = np.array(second, dtype=np.int32)
        content = ids.astype("<i4").data
        digests = [xxhash.xxh3_64_intdigest(content[start:end]) for start, end in itertools.pairwise(offsets.tolist())]
        return cls(ids, mask, offsets, np.array(digests, dtype=np.uint64), targets, seconds, records, places)

    @property
    def counts(self) -> Counts:
        """Numbers of documents, tokens and supervised tokens. A document's first token has no loss."""
        supervised = int(self.mask.sum()) - int(self.mask[self.offsets[:-1]].sum())
        return Counts(documents=len(self.targets), tokens=len(self.ids), supervised=supervised)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Open the documents in a folder as memory maps."""
        # Memory maps are converted to plain arrays, since slicing a np.memmap takes 30 microseconds more.
        return cls(*(np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in _ARRAYS))

    def write(self, folder: Path, counts: Counts) -> None:
        """Write documents and `counts` to the new `folder`, which appears once complete; OutputError on failure."""
        write_folder(folder, {name: ArrayParts.of(getattr(self, name)) for name in _ARRAYS}, _texts(counts))


def join_parts(parts: Sequence[Path], folder: Path, counts: Counts) -> None:
    """Concatenate the documents of the folders `parts` into `folder`, with one part in memory at a time."""
    sizes = {"ids": counts.tokens, "mask": counts.tokens, "offsets": counts.documents + 1}
    for name in ("records", "places"):
        sizes[name] = sum(len(np.load(part / f"{name}.npy", mmap_mode="r")) for part in parts)
    arrays = {
        name: ArrayParts(dtype, sizes.get(name, counts.documents), _concatenate(parts, name))
        for name, dtype in _ARRAYS.items()
    }
    write_folder(folder, arrays, _texts(counts))


def _concatenate(parts: Sequence[Path], name: str) -> Iterator[NDArray[np.generic]]:
    if name != "offsets":
        yield from (np.load(part / f"{name}.npy") for part in parts)
        return
    end = 0
    yield np.zeros(1, dtype=np.int64)
    for part in parts:
        offsets = np.load(part / "offsets.npy")[1:] + end
        end = int(offsets[-1]) if len(offsets) else end
        yield offsets


def _texts(counts: Counts) -> dict[str, str]:
    return {"counts.json": json.dumps(asdict(counts))}


def read_counts(folder: Path) -> Counts:
    """Read the counts that were written with a folder of documents."""
    written = json.loads((folder / "counts.json").read_text(encoding="utf-8"))
    named = {
        name: NamedCounts({key: (rows, where) for key, (rows, where) in written[name]["entries"].items()})
        for name in ("dropped", "noted", "unread", "forms", "named", "by_path")
    }
    lists = {"bad": tuple(written["bad"]), "long_prompts": tuple(map(tuple, written["long_prompts"]))}
    return Counts(**written | named | lists)
