"""Reading data files: compressed, with a BOM, in another encoding, and values that look like missing ones."""

import gzip
import json
import re
import tracemalloc
from pathlib import Path

import pyarrow
import pytest

from ds_finetune.data import files
from ds_finetune.data.files import FileFormat, read_file
from ds_finetune.data.sources import find_sources, read_records
from ds_finetune.errors import DataError

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "Zürich 東京", "completion": "d"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def rows_of(path: Path) -> list[dict[str, object]]:
    return [dict(record) for source in find_sources([str(path)]) for _, record in read_records(source)]


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as out:
        out.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.JSONL", "rows.jsonl.gz", "ROWS.JSONL.GZ", "rows.jsonl.zst", "rows.ndjson"]
)
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
def test_compressed_files_upper_case_endings_and_byte_order_marks(tmp_path: Path, name: str, bom: bytes) -> None:
    pack = gzip.compress if name.lower().endswith(".gz") else zstd if name.endswith(".zst") else bytes
    (tmp_path / name).write_bytes(pack(bom + LINES))
    assert rows_of(tmp_path / name) == rows_of(tmp_path) == ROWS


@pytest.mark.parametrize(("kind", "pack"), [("gz", gzip.compress), ("zst", zstd)])
def test_a_compressed_file_that_is_cut_short_is_an_error(tmp_path: Path, kind: str, pack: object) -> None:
    path = tmp_path / f"rows.jsonl.{kind}"
    path.write_bytes(pack(LINES * 1000)[:-6])  # type: ignore[operator]
    with pytest.raises(DataError, match=r"rows.jsonl.* cannot be decompressed") as caught:
        rows_of(path)
    assert " -t " in caught.value.hint


def test_a_compressed_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet.gz").write_bytes(b"x")
    with pytest.raises(DataError, match=r"ends in `\.parquet\.gz`"):
        rows_of(tmp_path / "rows.parquet.gz")


def test_values_of_csv_are_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        '\ufeffprompt,completion\n"Namibia, in two letters?",NA\nnull,007\n"two\nlines ""quoted""",\n', encoding="utf-8"
    )
    assert rows_of(path) == [
        {"prompt": "Namibia, in two letters?", "completion": "NA"},
        {"prompt": "null", "completion": "007"},
        {"prompt": 'two\nlines "quoted"', "completion": ""},
    ]


def test_a_single_column_in_quotes_may_hold_a_separator(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('\ufeff"question; answer"\n"a; b"\nc\n', encoding="utf-8")
    assert rows_of(path) == [{"question; answer": "a; b"}, {"question; answer": "c"}]
    path.write_text("question; answer\na; b\n")
    with pytest.raises(DataError, match="its columns are separated by semicolons"):
        rows_of(path)


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.txt", b"one\r\ntwo\n\rthree\r\n", ["one\ntwo\n\rthree\n"]),
        ("a.csv", b'text,n\r\n"one\r\ntwo\n\r",1\r\nthree,2\r\n', ["one\ntwo\n\r", "three"]),
        ("a.csv", b'text,n\n"one\r\ntwo\n",1\nthree,2\n', ["one\r\ntwo\n", "three"]),
        ("a.jsonl", b'{"text": "one\\r\\ntwo"}\r\n{"text": "three"}\r\n', ["one\r\ntwo", "three"]),
        ("a.json", b'[{"text": "one\\r\\ntwo"},\r\n{"text": "three"}]\r\n', ["one\r\ntwo", "three"]),
    ],
    ids=["text", "csv", "value of csv", "jsonl", "json"],
)
def test_line_ends_of_a_file_are_line_feeds(name: str, content: bytes, texts: list[str], tmp_path: Path) -> None:
    """Python's universal newlines are the reference for texts; a carriage return in a value is the user's."""
    (tmp_path / name).write_bytes(content)
    assert [row["text"] for row in rows_of(tmp_path / name)] == texts
    if name == "a.txt":
        assert texts == [(tmp_path / name).read_text().replace("\n\nthree", "\n\rthree")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prompt,completion\na,b,c\n", "row 1 (line 2) has 3 values, and the header has 2 columns"),
        ("prompt,completion\na\n", "row 1 (line 2) has 1 values, and the header has 2 columns"),
        ("\ufeffprompt,completion\na,b\n\ufeffprompt,completion\nc,d\n", "row 2 repeats the header"),
        ("prompt,prompt\na,b\n", "two columns named `prompt`"),
        ('prompt,completion\na,"b\n', "is not CSV: unexpected end of data"),
    ],
)
def test_csv_that_does_not_fit_its_header(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "rows.csv").write_text(content)
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "rows.csv")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        (
            "rows.jsonl",
            b'{"text": "ok"}\n{"text": "caf\xe9"}\n',
            "rows.jsonl line 2 is not UTF-8: byte 0xe9 at offset 28 of",
        ),
        ("rows.json", b'[{"text": "caf\xe9"}]', "rows.json is not UTF-8: byte 0xe9 at offset 14 of"),
        ("rows.csv", b"text\nok\ncaf\xe9\n", "rows.csv line 3 is not UTF-8: byte 0xe9 at offset 11 of"),
        ("rows.txt", b"\xef\xbb\xbfcaf\xe9", "rows.txt is not UTF-8: byte 0xe9 at offset 6 of"),
    ],
)
def test_latin1_is_named_with_the_byte(tmp_path: Path, name: str, content: bytes, place: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / name)
    assert place in caught.value.message
    assert content[int(caught.value.message.split("offset ")[1].split()[0])] == 0xE9
    assert "iconv -f LATIN1 -t UTF-8" in caught.value.hint


def test_utf16_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "rows.txt")
    assert "iconv -f UTF-16" in caught.value.hint


@pytest.mark.parametrize(
    ("codec", "name", "iconv", "text"),
    [
        ("gbk", "GBK", "GBK", "请问图书馆几点开门？"),
        ("cp932", "Shift-JIS", "CP932", "図書館は何時に開きますか。①"),
        ("latin1", "Latin-1", "LATIN1", "Un élan naïf à Noël, ça va? Où? Éë"),
    ],
)
def test_the_encoding_of_other_text_is_named(tmp_path: Path, codec: str, name: str, iconv: str, text: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "ok"}\n' + f'{{"text": "{text}"}}\n'.encode(codec))
    with pytest.raises(DataError, match=rf"line 2 is not UTF-8: byte .* of the file; it may be {name}\n") as caught:
        rows_of(tmp_path / "rows.jsonl")
    assert f"`iconv -f {iconv} -t UTF-8 OLD > NEW`" in caught.value.hint


def test_a_repeated_key_is_refused_with_its_place(tmp_path: Path) -> None:
    lines, items = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text('{"text": "a"}\n{"text": "b", "text": "c"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl line 2 cannot be read: the key 'text' is repeated"):
        rows_of(lines)
    items.write_text('[{"text": "a"},\n {"turns": [{"role": "x", "role": "y"}]}]')
    with pytest.raises(DataError, match=r"rows\.json item 2 \(line 2\) cannot be read: the key 'role' is repeated"):
        rows_of(items)
    items.write_text('{"text": 1, "text": 2}')
    with pytest.raises(DataError, match=r"rows\.json .*cannot be read: the key 'text' is repeated"):
        rows_of(items)


@pytest.mark.parametrize(
    ("name", "content", "bad"),
    [
        ("a.jsonl", b'{"a": "1"}\n{"a": "\xe9"}\n{"a": "3"}\n', {1: "line 2 is not UTF-8: byte 0xe9 at offset 18"}),
        ("a.json", b'[{"a": "1"}, 2, {"a": "3"}]', {1: "item 2 is a number, not an object"}),
        (
            "a.json",
            b'[{"a": "1"},\n {"a": "2", "a": "4"}, {"a": "3"}]',
            {1: r"item 2 (line 2) cannot be read: the key 'a'"},
        ),
        ("a.csv", b'a\n1\n"x"y\n3\n', {1: "line 3 is not CSV"}),
        ("a.csv", b"a\n1\n\xe9\n3\n", {1: "line 3 is not UTF-8: byte 0xe9"}),
    ],
    ids=["encoding", "item", "key", "quotes", "encoding of csv"],
)
def test_rows_that_cannot_be_read_are_passed_over_one_by_one(
    tmp_path: Path, name: str, content: bytes, bad: dict[int, str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    file_format = FileFormat.of(path)
    assert file_format is not None
    records = [record for _, record in read_file(str(path), file_format.name)]
    assert [number for number, record in enumerate(records) if isinstance(record, DataError)] == list(bad)
    assert [record["a"] for number, record in enumerate(records) if number not in bad] == ["1", "3"]
    for number, message in bad.items():
        unreadable = records[number]
        assert isinstance(unreadable, DataError)
        assert re.search(message.replace("(", r"\(").replace(")", r"\)"), str(unreadable))
    with pytest.raises(DataError):
        list(read_records(find_sources([str(path)])[0]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'a\n1\n"2\n3\n4\n', "line 5 is not CSV: unexpected end of data"),
        ("a.csv", b'a\n1\n"2\n3"x\n4\n', "line 4 is not CSV"),
        ("a.json", b'[{"a": 1, "a": 2}, {"a": }]', "item 2 (line 1) cannot be read"),
    ],
    ids=["open quote", "quote of a later line", "syntax"],
)
def test_rows_whose_end_is_not_known_are_never_passed_over(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_file(str(path), name.partition(".")[2]))
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl.gz", b'{"text": "a"}\n{"text": "' + b"b" * 2000, "line 2 has more than 1,000 bytes"),
        ("rows.jsonl", b'{"text": "a"}\n' + b"b" * 2000, "line 2 has more than 1,000 bytes"),
        ("rows.csv.gz", b"text,label\na," + b"b" * 2000, "line 2 has more than 1,000 bytes"),
        ("rows.csv.gz", b'text,label\na,"' + b"b\n" * 1000, "field larger than field limit"),
        ("rows.txt.gz", b"b\n" * 2000, "more than 3,000 bytes when decompressed"),
        ("rows.json.GZ", b"[" + b"\n" * 4000, "more than 3,000 bytes when decompressed"),
    ],
)
def test_a_compressed_file_of_gigabytes_is_refused_before_it_is_in_memory(
    name: str, content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(files, "_MOST_WHOLE_BYTES", 3000)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / name)


def test_a_bomb_takes_no_more_memory_than_a_line(tmp_path: Path) -> None:
    """One line of 400 MiB, compressed to 0.4 MiB."""
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(400):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(DataError, match="line 1 has more than 67,108,864 bytes"):
        rows_of(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 << 20
