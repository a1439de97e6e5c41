"""Reads the records of data files of several formats, compressed or not; errors name the line, row or byte."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from ds_finetune.config.run_file import kind_of_value
from ds_finetune.config.units import GIB, MIB
from ds_finetune.data.messages import unique_keys
from ds_finetune.errors import DataError

Record = Mapping[str, Any]
ReadRecord = Record | DataError
"""A record of a data file, or the error of a line or row that cannot be read."""
FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Data format by file name suffix; suffixes may be in upper case."""
_COMPRESSED = (".gz", ".zst")
_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_SHOWN_CHARACTERS = 80
_MOST_LINE_BYTES, _MOST_WHOLE_BYTES = 64 * MIB, GIB
"""Maximum bytes of a line, and of a compressed file that is decompressed into memory: 10 MB of gzip can hold 10 GB."""
_PARQUET_ROWS = 100
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
"""Characters other than commas that separate the columns of some CSV files, with their names."""


@dataclass(frozen=True)
class FileFormat:
    """Format of a data file, a value of FORMATS, and the suffix of its compression (empty without compression)."""

    name: str
    compression: str

    @classmethod
    def of(cls, path: Path) -> "FileFormat | None":
        """Format of a data file by the ending of its name; None for an unknown ending."""
        endings = [ending.lower() for ending in path.suffixes]
        compression = endings.pop() if endings and endings[-1] in _COMPRESSED else ""
        name = FORMATS.get(endings[-1]) if endings else None
        if name is None or (compression and name == "parquet"):
            return None
        return cls(name, compression)


def known_endings() -> str:
    """Text for messages: the file name endings of data files that can be read."""
    return f"{', '.join(FORMATS)}; all but .parquet also with {' or '.join(_COMPRESSED)}"


def read_file(path: str, file_format: str) -> Iterator[tuple[str, ReadRecord]]:
    """Read the records of a data file, each with its location (`file line 7`); DataError where reading must stop."""
    yield from _READERS[file_format](path)


@contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    """Open a data file for reading decompressed bytes; DataError where the compressed data is damaged or truncated."""
    file_format = FileFormat.of(Path(path))
    compression = file_format.compression if file_format else ""
    try:
        with _decompressed(path, compression) as file:
            yield file
    except (EOFError, zlib.error, OSError) as broken:
        if not compression:
            raise
        checker = "gzip" if compression == ".gz" else "zstd"
        raise DataError(
            f"{path} cannot be decompressed: {broken}", hint=f"check it with `{checker} -t {path}`"
        ) from broken


def _decompressed(path: str, compression: str) -> IO[bytes]:
    if compression == ".gz":
        return cast("IO[bytes]", gzip.open(path))
    if not compression:
        return Path(path).open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))


def _lines(path: str) -> Iterator[tuple[int, str | DataError]]:
    """Yield the lines of a file with their numbers; a line that is not UTF-8 becomes an error with line and byte."""
    offset = 0
    with _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES + 1), b""), start=1):
            if len(line) > _MOST_LINE_BYTES:
                raise DataError(
                    f"{path} line {number} has more than {_MOST_LINE_BYTES:,} bytes",
                    hint="a line is a row: check the file, and write shorter rows",
                )
            if number == 1 and line.startswith(_UTF_16):
                _decode(line, path, offset=0)
            start = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
            try:
                text: str | DataError = _decode(line[start:], f"{path} line {number}", offset=offset + start)
            except DataError as broken:
                text = broken
            yield number, text
            offset += len(line)


def _read_text(path: str) -> str:
    with _open(path) as file:
        is_compressed = Path(path).suffix.lower() in _COMPRESSED
        content = file.read(_MOST_WHOLE_BYTES + 1 if is_compressed else -1)
    if is_compressed and len(content) > _MOST_WHOLE_BYTES:
        raise DataError(
            f"{path} has more than {_MOST_WHOLE_BYTES:,} bytes when decompressed, which is too much to read at once",
            hint="write the rows to a .jsonl file, which is read line by line",
        )
    start = len(_BOM) if content.startswith(_BOM) else 0
    return _decode(content[start:], path, offset=start)


def _decode(content: bytes, where: str, *, offset: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as broken:
        is_utf_16 = offset == 0 and content.startswith(_UTF_16)
        encoding, iconv = ("UTF-16", "UTF-16") if is_utf_16 else _guess_encoding(content)
        raise DataError(
            f"{where} is not UTF-8: byte 0x{content[broken.start]:02x} at offset {offset + broken.start} of the file; "
            f"it may be {encoding}",
            hint=f"convert the file, e.g. `iconv -f {iconv} -t UTF-8 OLD > NEW`, and check the text of NEW",
        ) from None


def _guess_encoding(content: bytes) -> tuple[str, str]:
    """Guess the encoding of bytes that are not UTF-8. Returns its name for the message, and its name for `iconv`.

    All bytes are valid in Latin-1, and many pairs of Latin-1 letters are valid in East Asian encodings. An East Asian
    encoding is named only if all bytes are valid in it and most characters are common ones: kana or level-1 ideographs.
    """
    fractions = {("Latin-1", "LATIN1"): 0.5}
    for name, iconv, standard, last_lead_byte in (("GBK", "GBK", "gb2312", 0xD7), ("Shift-JIS", "CP932", "sjis", 0x97)):
        with suppress(UnicodeDecodeError):
            foreign = [c for c in content.decode(iconv) if not c.isascii()]
            common = [c for c in foreign if 0x80 < (c.encode(standard, "ignore") or b"\0")[0] <= last_lead_byte]
            fractions[name, iconv] = len(common) / len(foreign)
    return max(fractions, key=lambda encoding: fractions[encoding])


def _read_jsonl(path: str) -> Iterator[tuple[str, ReadRecord]]:
    for number, line in _lines(path):
        where, hint = f"{path} line {number}", "correct or remove the line"
        if isinstance(line, DataError):
            yield where, line
        elif shown := line.strip()[:_SHOWN_CHARACTERS]:
            try:
                record = _as_record(json.loads(line.rstrip(), object_pairs_hook=unique_keys), where)
            except json.JSONDecodeError as broken:
                record = DataError(f"{where} column {broken.colno} is not JSON: {broken.msg}: {shown!r}", hint=hint)
            except (ValueError, RecursionError) as broken:
                record = DataError(f"{where} cannot be read: {broken}: {shown!r}", hint=hint)
            yield where, record


def _read_json(path: str) -> Iterator[tuple[str, ReadRecord]]:
    text = _read_text(path)
    try:
        records = json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as broken:
        is_lines = broken.msg == "Extra data" and text.lstrip().startswith("{")
        raise DataError(
            f"{path} line {broken.lineno} column {broken.colno} is not JSON: {broken.msg}",
            hint="a .json file is one list of objects"
            + "; name the file .jsonl: it has an object on each line" * is_lines,
        ) from None
    except (ValueError, RecursionError) as broken:
        if not text.lstrip().startswith("["):
            raise DataError(f"{path} cannot be read: {broken}", hint="a .json file is one list of objects") from None
        yield from _items_one_by_one(text, path)
        return
    if not isinstance(records, list):
        named = records if isinstance(records, dict) else {}
        lists = [name for name, value in named.items() if value and isinstance(value, list)]
        raise DataError(
            f"{path} is {kind_of_value(records)}, not a list of objects",
            hint=f"write the list `{lists[0]}` in it to a file of its own"
            if len(lists) == 1
            else "name the file .jsonl if it has one object on each line",
        )
    for number, record in enumerate(records, start=1):
        yield f"{path} item {number}", _as_record(record, f"{path} item {number}")


def _items_one_by_one(text: str, path: str) -> Iterator[tuple[str, ReadRecord]]:
    """Read a JSON list item by item, to name an item that has valid syntax but is refused, e.g. for a repeated key.

    DataError where the syntax of a later item is invalid, or the end of an item cannot be found.
    """
    strict, lenient = json.JSONDecoder(object_pairs_hook=unique_keys), json.JSONDecoder(parse_int=str)
    number, at = 0, text.find("[") + 1
    while True:
        at = next(i for i in range(at, len(text)) if text[i] not in ", \t\r\n")
        if text[at] == "]":
            return
        number += 1
        where = f"{path} item {number} (line {text.count(chr(10), 0, at) + 1})"
        try:
            record, at = strict.raw_decode(text, at)
            yield where, _as_record(record, where)
        except (ValueError, RecursionError) as broken:
            error = DataError(f"{where} cannot be read: {broken}", hint="correct that item")
            yield where, error
            try:
                _, at = lenient.raw_decode(text, at)
            except (ValueError, RecursionError):
                raise error from None


def _as_record(value: object, where: str) -> ReadRecord:
    if isinstance(value, dict):
        return value
    is_file = isinstance(value, list) and value and isinstance(value[0], dict)
    return DataError(
        f"{where} is {kind_of_value(value)}, not an object",
        hint="each row is an object with named columns" + "; name the file .json if it is one list" * bool(is_file),
    )


def _read_csv(path: str) -> Iterator[tuple[str, ReadRecord]]:
    """Read the rows of a CSV file. All values remain texts, even `NA`, `null` and `007`."""
    csv.field_size_limit(_MOST_LINE_BYTES)
    undecodable: list[DataError] = []
    lines = _csv_lines(path, undecodable)
    rows = csv.reader(chain([first := next(lines, "")], lines), strict=True)
    header = _next_row(rows, path, undecodable) or []
    if isinstance(header, DataError):
        raise header
    # A single name in quotes may hold a separator of other files.
    is_single = len(header) == 1 and not first.startswith('"')
    if is_single and (other := next((name for mark, name in _SEPARATORS.items() if mark in header[0]), "")):
        raise DataError(
            f"{path} has one column, `{header[0]:.60}`: its columns are separated by {other}",
            hint="write the file with commas between the columns, and values with commas in double quotes",
        )
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise DataError(f"{path} has two columns named `{repeated[0]}`", hint="give each column its own name")
    number = 0
    while (row := _next_row(rows, path, undecodable)) is not None:
        if not row:
            continue
        number += 1
        where = f"{path} row {number}"
        if not isinstance(row, DataError) and len(row) != len(header):
            row = DataError(
                f"{where} (line {rows.line_num}) has {len(row)} values, and the header has {len(header)} columns",
                hint="put values with commas or line breaks in double quotes",
            )
        elif not isinstance(row, DataError) and [value.removeprefix("\ufeff") for value in row] == header:
            row = DataError(f"{where} repeats the header", hint="remove that line: two files were joined")
        yield where, row if isinstance(row, DataError) else dict(zip(header, row, strict=True))


def _csv_lines(path: str, undecodable: list[DataError]) -> Iterator[str]:
    """Yield the lines of a CSV file; one that is not UTF-8 becomes an empty field, with an error in `undecodable`.

    Where the header ends in CRLF, so does each line break in a quoted value: these are read as LF too.
    """
    is_windows = False
    for number, line in _lines(path):
        if isinstance(line, DataError):
            undecodable.append(line)
            line = '""\n'
        is_windows = line.endswith("\r\n") if number == 1 else is_windows
        yield f"{line[:-2]}\n" if is_windows and line.endswith("\r\n") else line


def _next_row(rows: Any, path: str, undecodable: list[DataError]) -> list[str] | DataError | None:  # noqa: ANN401 - a csv.reader
    """Read the next row of a CSV file: the row, or the error if it cannot be read, or None at the end of the file.

    DataError where the faulty row spans several lines, since its end is unknown if a quote is missing.
    """
    before = rows.line_num
    try:
        row: list[str] | DataError | None = next(rows, None)
    except csv.Error as broken:
        row = DataError(
            f"{path} line {rows.line_num} is not CSV: {broken}", hint="check the double quotes of that line"
        )
    if undecodable:
        row = undecodable.pop()
        undecodable.clear()
    if isinstance(row, DataError) and rows.line_num > before + 1:
        raise row
    return row


class ClassNumber(int):
    """Value of a `datasets.ClassLabel` column: the class index, with the name `names[index]`."""

    names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the class with this index."""
        return self.names[self]


def with_class_names(record: Record, classes: Mapping[str, Sequence[str]]) -> Record:
    """Replace class indices by `ClassNumber`, which has the class name too. `classes` are class names by column."""
    named = dict(record)
    for column, names in classes.items():
        if isinstance(named.get(column), int) and 0 <= named[column] < len(names):
            named[column] = ClassNumber(named[column])
            named[column].names = tuple(names)
    return named


def _read_parquet(path: str) -> Iterator[tuple[str, ReadRecord]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            records = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(batch_size=_PARQUET_ROWS))
            written = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
            classes = {
                column: feature["names"]
                for column, feature in written.get("info", {}).get("features", {}).items()
                if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
            }
            for number, record in enumerate(records, start=1):
                yield f"{path} row {number}", with_class_names(record, classes) if classes else record
    except (pyarrow.ArrowException, OSError) as broken:
        raise DataError(f"{path} cannot be read as parquet: {broken}", hint="check the file's format") from broken


_READERS: Mapping[str, Callable[[str], Iterator[tuple[str, ReadRecord]]]] = {
    "json": _read_json,
    "jsonl": _read_jsonl,
    # CRLF is read as LF, as in the reader for texts of `datasets`.
    "text": lambda path: iter([(path, {"text": _read_text(path).replace("\r\n", "\n")})]),
    "csv": _read_csv,
    "parquet": _read_parquet,
}
