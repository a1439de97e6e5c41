"""Finds the files and hub data sets that a run file names, and reads their records.

Splits are recognised by the names of files, folders and data sets, as in `datasets`.
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from glob import has_magic
from itertools import count
from pathlib import Path, PurePath
from typing import Any

import xxhash

from ds_finetune.config.units import MIB
from ds_finetune.config.value_types import named_files
from ds_finetune.data.files import FileFormat, ReadRecord, Record, known_endings, read_file, with_class_names
from ds_finetune.errors import DataError
from ds_finetune.foreign.hub_access import hub_problem, offline, without_password

_WORDS: Mapping[str, frozenset[str]] = {
    "train": frozenset({"train", "training"}),
    "validation": frozenset({"validation", "valid", "dev", "val"}),
    "test": frozenset({"test", "testing", "eval", "evaluation"}),
}
"""Words in a file name that name a split (datasets 5.2, data_files.py:43-47)."""
DEFAULT_SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "eval": ("validation", "test")}
"""Splits that are read where the run file names none, for training and evaluation; the first that exists is chosen."""


def splits_of(name: str) -> set[str]:
    """Splits that occur as words in a file name: `test` for `test-00000-of-00001.parquet`, none for `contest.json`."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    return {split for split, own in _WORDS.items() if own & words}


def split_of_file(path: PurePath) -> str:
    """Split named by a file's name, or else by the nearest folder's name; empty if no split or several are named."""
    for part in reversed(path.parts):
        splits = splits_of(part)
        if splits:
            return splits.pop() if len(splits) == 1 else ""
    return ""


@dataclass(frozen=True)
class Source:
    """A data file, or a hub data set with its subset and split; `purpose` is `train` or `eval`.

    `format` is a value of `files.FORMATS`, or `hub`. `note` says which split of a folder is read, and how many of the
    folder's files; all files of the folder have the same note.
    """

    path: str
    format: str
    subset: str = ""
    split: str = ""
    purpose: str = "train"
    note: str = ""
    entry: int = 0
    """Index of this source's path in the run file's list of data paths."""

    @property
    def fingerprint(self) -> tuple[str, int, int]:
        """Identity of a data source: a file's path, size and time of change, or a hub id with subset and split."""
        if self.format == "hub":
            return f"{self.path}:{self.subset}:{self.split or DEFAULT_SPLITS[self.purpose]}", 0, 0
        stat = Path(self.path).stat()
        return str(Path(self.path).resolve()), stat.st_size, stat.st_mtime_ns


def find_sources(paths: Sequence[str], *, purpose: str = "train") -> list[Source]:
    """Find the data sources that `paths` name, in a stable order; folders are searched.

    A path may end in `:split`, and a hub id in `:subset:split`. If no split is named, `purpose` selects the training or
    the held-out split. DataError for files that are missing, empty or of an unknown format.
    """
    files = [(entry, file) for entry, path in enumerate(paths) for file in named_files(path)]
    sources = [replace(source, entry=entry) for entry, file in files for source in _expand(file, purpose)]
    for source in sources:
        if source.format != "hub" and Path(source.path).stat().st_size == 0:
            raise DataError(f"data file `{source.path}` is empty", hint="write at least one row, or leave it out")
    return sources


@dataclass(frozen=True)
class RecordChoice:
    """Selects which of the first `rows` records (None: all) of the training files are read: the records held out for
    evaluation if `is_held_out`, else all others.

    One record of each block of 1 / `fraction` records is held out, chosen by a hash of `seed` and the block's number.
    So the choice does not depend on the number of records or of processes.
    """

    rows: int | None = None
    fraction: Fraction = Fraction(0)
    seed: int = 0
    is_held_out: bool = False

    def read(self, sources: Sequence[Source]) -> Iterator[tuple[Source, Iterator[tuple[str, ReadRecord]]]]:
        """Yield each data source with its chosen records and their locations; an unreadable record is an error."""
        numbers = iter(range(self.rows)) if self.rows else count()
        for source in sources:
            numbered = zip(read_or_errors(source), numbers, strict=False)
            yield source, (record for record, number in numbered if self._takes(number))

    def _takes(self, number: int) -> bool:
        if not self.fraction:
            return True
        block = int(number * self.fraction)
        first, end = (math.ceil(edge / self.fraction) for edge in (block, block + 1))
        held_out = first + xxhash.xxh64_intdigest(f"{self.seed} {block}".encode()) % (end - first)
        return (number == held_out) == self.is_held_out


def read_records(source: Source) -> Iterator[tuple[str, Record]]:
    """Read the records of a data source, each with its location (`file line 7`); DataError where one cannot be read."""
    for where, record in read_or_errors(source):
        if isinstance(record, DataError):
            raise record
        yield where, record


def read_or_errors(source: Source) -> Iterator[tuple[str, ReadRecord]]:
    """Read the records of a data source, each with its location. An unreadable record is replaced by its error."""
    if source.format == "hub":
        yield from read_hub(source.path, source.subset, source.split, purpose=source.purpose)
    else:
        yield from read_file(source.path, source.format)


def _expand(path: str, purpose: str) -> Iterator[Source]:
    base, *names = [path] if Path(path).exists() else path.split(":")
    file = Path(base)
    _check_no_description(file / _DESCRIPTION if file.is_dir() else file)
    if file.is_dir():
        if len(names) > 1:
            raise DataError(
                f"data folder `{path}` has no subsets",
                hint="name the folder of the subset, and its split after a colon",
            )
        yield from _files_of(base, "".join(names), purpose)
    elif file.is_file():
        file_format = FileFormat.of(file)
        if names:
            raise DataError(
                f"data file `{base}` has no split `{':'.join(names)}`", hint="name the file without a split"
            )
        if file_format is None:
            raise DataError(
                f"data file `{path}` ends in `{''.join(file.suffixes[-2:])}`", hint=f"known endings: {known_endings()}"
            )
        yield Source(path, file_format.name, purpose=purpose)
    elif FileFormat.of(file) or base.startswith((".", "/", "~")) or base.count("/") != 1:
        mark = next((mark for mark in _NO_PATH if mark in path), "")
        is_pattern = mark != "[" and has_magic(path)
        raise DataError(
            f"no data file matches `{path}`" if is_pattern else f"data file `{path if mark else base}` does not exist",
            hint=_NO_PATH.get(mark, "check data.train and data.eval; paths are relative to the working directory"),
        )
    else:
        yield _hub_source(base, names, purpose)


_NO_PATH = {
    "[": "slices of files are not read: data.rows: N reads the first rows, and data.eval: 20% holds rows out",
    "//": "only files of this machine and hub ids `owner/name` are read: download the file, and name its path",
    ",": "write several files as a list: `train: [a.jsonl, b.jsonl]`",
    "~": "`~` is not expanded: write the whole path",
}
"""Parts of data paths that only other programs understand, each with the hint for the error message."""
_DESCRIPTION = "dataset_info.json"
"""File name of LLaMA-Factory's list of data sets; `Dataset.save_to_disk` also writes a description under this name."""


def _check_no_description(path: Path) -> None:
    if path.name != _DESCRIPTION or not path.is_file():
        return
    with suppress(ValueError):
        entries = json.loads(path.read_text(encoding="utf-8"))
        files = [e["file_name"] for e in entries.values() if isinstance(e, Mapping) and "file_name" in e]
        if files:
            raise DataError(
                f"data file `{path}` is LLaMA-Factory's list of data sets, which holds no rows",
                hint=f"name the files of rows, e.g. `{path.with_name(str(files[0]))}`, and in data.columns the columns "
                "that the list renames",
            )
    raise DataError(
        f"data file `{path}` describes a data set that `datasets` has written, and Arrow files are not read",
        hint="write it as Parquet: load_from_disk(FOLDER).to_parquet('train.parquet'), and name that file",
    )


def _hub_source(path: str, names: Sequence[str], purpose: str) -> Source:
    split = ":".join(names)
    if "[" in split:
        raise DataError(
            f"data `{path}:{split}` is a slice of a split, and only whole splits are read",
            hint=f"write its rows to a file: load_dataset('{path}', split='{split}').to_json('rows.jsonl')",
        )
    if len(names) > 2 or not all(names):
        raise DataError(
            f"data `{':'.join((path, *names))}` is not a valid data set name",
            hint="write `id`, `id:split` or `id:subset:split`",
        )
    subset, split = ("", *names)[-2:] if names else ("", "")
    return Source(path, "hub", subset, split, purpose)


def _files_of(path: str, split: str, purpose: str) -> Iterator[Source]:
    folder = Path(path)
    all_files = {file: FileFormat.of(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    formats = {file: file_format for file, file_format in all_files.items() if file_format is not None}
    if not formats:
        raise DataError(
            f"data folder `{path}` has no file that ends in {known_endings()}", hint="name a folder with data files"
        )
    splits = {file: split_of_file(file.relative_to(folder)) for file in formats}
    chosen = split or _choose_split(purpose, list(splits.values()), path)
    files = [file for file in formats if not chosen or splits[file] == chosen]
    if not files:
        raise DataError(
            f"data folder `{path}` has no split `{chosen}`", hint=f"its splits: {_split_names(splits.values())}"
        )
    mixed = {formats[file].name for file in files}
    if len(mixed) > 1:
        raise DataError(
            f"data folder `{path}` mixes {' and '.join(sorted(mixed))} files", hint="name the files themselves"
        )
    is_part = len(files) < len(formats)
    note = f"data.{purpose} `{path}`: split {chosen} is read, {len(files)} of {len(formats)} files" if is_part else ""
    yield from (Source(str(file), formats[file].name, split=chosen, purpose=purpose, note=note) for file in files)


def _choose_split(purpose: str, splits: Sequence[str], path: str) -> str:
    """Name of the split of a folder to read for `purpose`; empty to read all files.

    All files are read if no file is named after a split, or all are named after the wanted one.
    """
    named, fitting = {split for split in splits if split}, DEFAULT_SPLITS[purpose]
    if not named or named == {fitting[0]} or ("" in splits and len(named) == 1 and named <= set(fitting)):
        return ""
    if "" in splits:
        raise DataError(
            f"data folder `{path}` has files of {_split_names(named)}, "
            f"and {splits.count('')} files whose names contain no split",
            hint="name the files themselves, or one split after a colon",
        )
    chosen = next((split for split in fitting if split in named), "")
    if not chosen:
        kind = "training" if purpose == "train" else "held-out"
        raise DataError(
            f"data.{purpose} `{path}` has no {kind} split: its files are of {_split_names(named)}",
            hint=f"name another folder, or the split, e.g. `{path}:{min(named)}`",
        )
    return chosen


def _split_names(splits: Iterable[str]) -> str:
    return ", ".join(sorted({split for split in splits if split})) or "none, since no file name contains a split"


def estimate_rows(sources: Sequence[Source]) -> int:
    """Estimated number of data rows, for showing the remaining time; 0 if some source cannot be estimated."""
    numbers = [_estimate_rows_of(source) for source in sources]
    return sum(numbers) if all(numbers) else 0


def _estimate_rows_of(source: Source) -> int:
    path = Path(source.path)
    if source.format == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        # A read error is ignored here, because a damaged file is reported when its rows are read.
        with suppress(OSError, pa.ArrowException):
            return int(pq.read_metadata(path).num_rows)
        return 0
    file_format = None if source.format == "hub" else FileFormat.of(path)
    if file_format is None or file_format.compression or source.format not in ("jsonl", "csv"):
        return 0
    with path.open("rb") as file:
        start = file.read(MIB)
    return round(max(start.count(b"\n"), 1) / max(len(start), 1) * path.stat().st_size)


def read_hub(path: str, subset: str, split: str, *, purpose: str) -> Iterator[tuple[str, Record]]:
    """Read one split of a hub data set; an empty `split` selects the default for `purpose` (`train` or `eval`)."""
    from datasets import ClassLabel

    splits = _load(path, subset)
    name = split or default_split(list(splits), path, purpose=purpose)
    if name not in splits:
        raise DataError(f"data set `{path}` has no split `{name}`", hint=f"its splits are {', '.join(splits)}")
    features = splits[name].features.items()
    classes = {key: feature.names for key, feature in features if isinstance(feature, ClassLabel)}
    for number, record in enumerate(splits[name], start=1):
        yield f"{path}:{name} row {number}", with_class_names(record, classes) if classes else record


def default_split(names: Collection[str], path: str, *, purpose: str) -> str:
    """Choose the split of a hub data set: for `train` training, else validation or test; DataError if unclear."""
    for split in DEFAULT_SPLITS[purpose]:
        fitting = [name for name in names if name == split] or [name for name in names if splits_of(name) == {split}]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise DataError(
                f"data set `{path}` has the splits {', '.join(fitting)}", hint=f"name one, e.g. `{path}:{fitting[0]}`"
            )
    kind = "training" if purpose == "train" else "held-out"
    raise DataError(
        f"data set `{path}` has no {kind} split: its splits are {', '.join(names)}",
        hint=f"name one, e.g. `{path}:{next(iter(names))}`, or give a file",
    )


def _load(path: str, subset: str) -> Mapping[str, Any]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    problem = hub_problem()
    try:
        with offline() if problem else nullcontext():
            return load_dataset(path, subset or None)
    except (DatasetNotFoundError, OSError, ValueError) as missing:
        if problem:
            raise DataError(
                f"data `{path}` is neither a file nor in the cache of `datasets`, and {problem}",
                hint="correct the name, give a file, or run where the hub can be reached",
            ) from missing
        raise DataError(
            f"data `{path}` is neither a file nor a data set of the hub: {without_password(missing)}",
            hint=f"check the name; a subset is named before its split, e.g. `{path}:SUBSET:train`",
        ) from missing
