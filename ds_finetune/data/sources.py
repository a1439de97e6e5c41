"""Raw records from files, folders and hub ids; a broken line is named with its number."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_finetune.errors import DataError

Record = Mapping[str, Any]
_KINDS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True)
class Source:
    """One file of a known kind, or a hub id."""

    path: str
    kind: str

    @property
    def fingerprint(self) -> tuple[str, int, int]:
        """What changes when the content does, known without reading it: path, bytes and modification time of a file."""
        if self.kind == "hub":
            return self.path, 0, 0
        stat = Path(self.path).stat()
        return str(Path(self.path).resolve()), stat.st_size, stat.st_mtime_ns


def find_sources(paths: Sequence[str]) -> list[Source]:
    """The files behind paths (folders are searched), in a stable order; DataError for what is missing, empty or of no known kind."""
    found = [source for path in paths for source in _expand(path)]
    for source in found:
        if source.kind != "hub" and Path(source.path).stat().st_size == 0:
            raise DataError(f"data file `{source.path}` is empty", hint="write at least one row, or leave it out")
    return found


def read_records(source: Source) -> Iterator[tuple[str, Record]]:
    """Records of a source with where each stands (`file line 7`), for messages."""
    yield from _READERS[source.kind](source.path)


def _expand(path: str) -> Iterator[Source]:
    place = Path(path)
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.suffix in _KINDS)
        if not files:
            raise DataError(f"data folder `{path}` holds no {', '.join(_KINDS)} file", hint="name a folder with data files")
        kinds = {_KINDS[file.suffix] for file in files}
        if len(kinds) > 1:
            raise DataError(f"data folder `{path}` mixes {' and '.join(sorted(kinds))} files", hint="name the files themselves")
        yield from (Source(str(file), _KINDS[file.suffix]) for file in files)
    elif place.is_file():
        if place.suffix not in _KINDS:
            raise DataError(f"data file `{path}` ends in `{place.suffix}`", hint=f"known endings: {', '.join(_KINDS)}")
        yield Source(path, _KINDS[place.suffix])
    elif place.suffix in _KINDS or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise DataError(f"data file `{path}` does not exist", hint="check data.train and data.eval; paths are relative to where you start")
    else:
        yield Source(path, "hub")


def _read_jsonl(path: str) -> Iterator[tuple[str, Record]]:
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                record = json.loads(line.rstrip())
            except json.JSONDecodeError as broken:
                raise DataError(
                    f"{where} column {broken.colno} is not JSON: {broken.msg}: {line.strip()[:80]}", hint="mend or remove that line"
                ) from None
            yield where, _as_record(record, where)


def _read_json(path: str) -> Iterator[tuple[str, Record]]:
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as broken:
        raise DataError(
            f"{path} line {broken.lineno} column {broken.colno} is not JSON: {broken.msg}", hint="a .json file holds one list of objects"
        ) from None
    if not isinstance(records, list):
        raise DataError(f"{path} holds {type(records).__name__}, not a list of objects", hint="name the file .jsonl if it has an object a line")
    for number, record in enumerate(records, start=1):
        where = f"{path} item {number}"
        yield where, _as_record(record, where)


def _as_record(record: object, where: str) -> Record:
    if not isinstance(record, dict):
        raise DataError(f"{where} holds {type(record).__name__}, not an object", hint="each row is an object with named columns")
    return record


def _read_text(path: str) -> Iterator[tuple[str, Record]]:
    """A text file is one document."""
    yield path, {"text": Path(path).read_text(encoding="utf-8")}


def _read_table(kind: str) -> Callable[[str], Iterator[tuple[str, Record]]]:
    def read(path: str) -> Iterator[tuple[str, Record]]:
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError

        try:
            rows = load_dataset(kind, data_files=path, split="train", streaming=True)
            for number, record in enumerate(rows, start=1):
                yield f"{path} row {number}", record
        except (DatasetGenerationError, ValueError, OSError) as broken:
            raise DataError(f"{path} cannot be read as {kind}: {broken}", hint="check the file's format") from broken

    return read


def _read_hub(path: str) -> Iterator[tuple[str, Record]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        rows = load_dataset(path, split="train")
    except (DatasetNotFoundError, OSError, ValueError) as missing:
        raise DataError(f"data `{path}` is neither a file nor to be had from the hub: {missing}", hint="check the name, or give a file") from missing
    for number, record in enumerate(rows, start=1):
        yield f"{path} row {number}", record


_READERS: Mapping[str, Callable[[str], Iterator[tuple[str, Record]]]] = {
    "json": _read_json,
    "jsonl": _read_jsonl,
    "text": _read_text,
    "csv": _read_table("csv"),
    "parquet": _read_table("parquet"),
    "hub": _read_hub,
}
