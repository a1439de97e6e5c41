"""Reads the records of data files of several formats, compressed or not; errors name the line, row or byte."""

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from ds_finetune.data.messages import unique_keys
from ds_finetune.errors import DataError

Record = Mapping[str, Any]
FORMATS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Formats of files by ending; endings may be in upper case."""
_COMPRESSED = (".gz", ".zst")
_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_SHOWN_CHARACTERS = 80
_PARQUET_ROWS = 1000


class UnreadableRecord(dict[str, Any]):
    """Stands for a line or row of a file that cannot be read, with the error that says why."""

    def __init__(self, error: DataError) -> None:
        super().__init__()
        self.error = error

    def __reduce__(self) -> tuple[type, tuple[DataError]]:
        return type(self), (self.error,)


@dataclass(frozen=True)
class FileFormat:
    """The format of a file: a value of FORMATS, and the ending of its compression, empty for none."""

    name: str
    compression: str

    @classmethod
    def of(cls, path: Path) -> "FileFormat | None":
        """The format of a file by its name; None where the ending is not known."""
        endings = [ending.lower() for ending in path.suffixes]
        compression = endings.pop() if endings and endings[-1] in _COMPRESSED else ""
        name = FORMATS.get(endings[-1]) if endings else None
        if name is None or (compression and name == "parquet"):
            return None
        return cls(name, compression)


def known_endings() -> str:
    """The known endings, for messages."""
    return f"{', '.join(FORMATS)}; all but .parquet also with {' or '.join(_COMPRESSED)}"


def read_file(path: str, file_format: str, *, passes_unreadable: bool = False) -> Iterator[tuple[str, Record]]:
    """Records of a file, each with its location (`file line 7`); DataError names the location of unreadable data.

    With `passes_unreadable`, a line or row that cannot be read is an UnreadableRecord, and the next ones follow.
    """
    for where, record in _READERS[file_format](path):
        if isinstance(record, UnreadableRecord) and not passes_unreadable:
            raise record.error
        yield where, record


@contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed; DataError where the compressed data is damaged or ends early."""
    file_format = FileFormat.of(Path(path))
    compression = file_format.compression if file_format else ""
    if not compression:
        with Path(path).open("rb") as plain:
            yield plain
        return
    try:
        with _decompress(path, compression) as file:
            yield file
    except (EOFError, zlib.error, OSError) as broken:
        raise DataError(
            f"{path} cannot be decompressed: {broken}", hint=f"check it with `{_checker(compression)} -t {path}`"
        ) from broken


def _checker(compression: str) -> str:
    return "gzip" if compression == ".gz" else "zstd"


def _decompress(path: str, compression: str) -> IO[bytes]:
    if compression == ".gz":
        return cast("IO[bytes]", gzip.open(path))
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Numbered lines with their line ends; DataError names the line and byte that is not UTF-8."""
    offset = 0
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            start = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
            yield number, _decode(line[start:], f"{path} line {number}", offset=offset + start)
            offset += len(line)


def _whole_text(path: str) -> str:
    with _open(path) as file:
        content = file.read()
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
    """The likely encoding of bytes that are not UTF-8, for people and for `iconv`.

    All bytes are valid in Latin-1, and many pairs of its letters in the others. So these are named only where all bytes
    are valid in them and most of the characters are common: kana, or the ideographs of the first level of the standard.
    """
    shares = {("Latin-1", "LATIN1"): 0.5}
    for name, iconv, standard, last_lead_byte in (("GBK", "GBK", "gb2312", 0xD7), ("Shift-JIS", "CP932", "sjis", 0x97)):
        with suppress(UnicodeDecodeError):
            foreign = [c for c in content.decode(iconv) if not c.isascii()]
            common = [c for c in foreign if 0x80 < (c.encode(standard, "ignore") or b"\0")[0] <= last_lead_byte]
            shares[name, iconv] = len(common) / len(foreign)
    return max(shares, key=lambda encoding: shares[encoding])


def _read_jsonl(path: str) -> Iterator[tuple[str, Record]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            yield where, _as_record(_parse_line(line, where), where)
        except DataError as broken:
            yield where, UnreadableRecord(broken)


def _parse_line(line: str, where: str) -> object:
    try:
        return json.loads(line.rstrip(), object_pairs_hook=unique_keys)
    except json.JSONDecodeError as broken:
        what = f"column {broken.colno} is not JSON: {broken.msg}"
    except (ValueError, RecursionError) as broken:
        what = f"cannot be read: {broken}"
    raise DataError(f"{where} {what}: {line.strip()[:_SHOWN_CHARACTERS]!r}", hint="correct or remove that line")


def _read_json(path: str) -> Iterator[tuple[str, Record]]:
    text = _whole_text(path)
    try:
        records = json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as broken:
        raise DataError(
            f"{path} line {broken.lineno} column {broken.colno} is not JSON: {broken.msg}",
            hint="a .json file is one list of objects",
        ) from None
    except (ValueError, RecursionError) as broken:
        raise DataError(f"{_first_bad_item(text, path)} cannot be read: {broken}", hint="correct that item") from None
    if not isinstance(records, list):
        raise DataError(
            f"{path} is {type(records).__name__}, not a list of objects",
            hint="name the file .jsonl if it has one object on each line",
        )
    for number, record in enumerate(records, start=1):
        where = f"{path} item {number}"
        yield where, _as_record(record, where)


def _first_bad_item(text: str, path: str) -> str:
    """The location of the first item of a list that cannot be read, where its syntax is correct."""
    decoder, number, at = json.JSONDecoder(object_pairs_hook=unique_keys), 0, text.find("[") + 1
    if not text.lstrip().startswith("["):
        return path
    while True:
        number += 1
        at = next(i for i in range(at, len(text)) if text[i] not in ", \t\r\n")
        try:
            _, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return f"{path} item {number} (line {text.count(chr(10), 0, at) + 1})"


def _as_record(record: object, where: str) -> Record:
    if not isinstance(record, dict):
        raise DataError(
            f"{where} is {type(record).__name__}, not an object", hint="each row is an object with named columns"
        )
    return record


def _read_text(path: str) -> Iterator[tuple[str, Record]]:
    """The whole text of the file as one document."""
    yield path, {"text": _whole_text(path)}


def _read_csv(path: str) -> Iterator[tuple[str, Record]]:
    """Records of CSV rows. All values stay texts, even `NA`, `null` and `007`."""
    csv.field_size_limit(sys.maxsize)
    rows = csv.reader((line for _, line in _lines(path)), strict=True)
    try:
        header = next(rows, [])
        repeated = sorted({name for name in header if header.count(name) > 1})
        if repeated:
            raise DataError(f"{path} has two columns named `{repeated[0]}`", hint="give each column its own name")
        for number, row in enumerate((row for row in rows if row), start=1):
            where = f"{path} row {number}"
            if len(row) == len(header):
                yield where, dict(zip(header, row, strict=True))
                continue
            error = DataError(
                f"{where} (line {rows.line_num}) has {len(row)} values, and the header has {len(header)} columns",
                hint="put values with commas or line breaks in double quotes",
            )
            yield where, UnreadableRecord(error)
    except csv.Error as broken:
        raise DataError(
            f"{path} line {rows.line_num} is not CSV: {broken}", hint="check the double quotes of that line"
        ) from None


def _read_parquet(path: str) -> Iterator[tuple[str, Record]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            records = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(batch_size=_PARQUET_ROWS))
            yield from ((f"{path} row {number}", record) for number, record in enumerate(records, start=1))
    except (pyarrow.ArrowException, OSError) as broken:
        raise DataError(f"{path} cannot be read as parquet: {broken}", hint="check the file's format") from broken


_READERS: Mapping[str, Callable[[str], Iterator[tuple[str, Record]]]] = {
    "json": _read_json,
    "jsonl": _read_jsonl,
    "text": _read_text,
    "csv": _read_csv,
    "parquet": _read_parquet,
}
