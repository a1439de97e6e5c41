"""Files, folders and layouts."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ds_finetune.data.record_layouts import LAYOUTS, Completion, Conversation, PlainText, find_layout
from ds_finetune.data.sources import find_sources, read_records
from ds_finetune.errors import DataError
from tests.data.reading import sample_of

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]


def _write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "csv":
        pd.DataFrame(ROWS).to_csv(path, index=False)
    else:
        pd.DataFrame(ROWS).to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_rows_also_from_a_folder(tmp_path: Path, kind: str) -> None:
    path = _write(tmp_path, kind)
    for place in (path, tmp_path):
        (source,) = find_sources([str(place)])
        assert [dict(record) for _, record in read_records(source)] == ROWS


def test_text_is_one_document_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (source,) = find_sources([str(tmp_path / "a.txt")])
    assert [record for _, record in read_records(source)] == [{"text": "one\ntwo\n"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n[1]\n', "a.jsonl line 2 is a list, not an object"),
        ("a.json", '{"a": 1}', "is an object, not a list of objects"),
        ("a.json", "[1,\n2", "line 2 column 2 is not JSON"),
        ("a.doc", "x", "ends in `.doc`"),
        ("a.csv", "", "is empty"),
        ("a.csv", "a;b\n1;2\n", "its columns are separated by semicolons"),
        ("a.csv", "a\tb\n1\t2\n", "its columns are separated by tabs"),
        ("a.parquet", "nonsense", "cannot be read as parquet"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        [list(read_records(source)) for source in find_sources([str(tmp_path / name)])]
    assert message in caught.value.message
    assert caught.value.hint


def test_folders_that_mix_kinds_or_are_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no file"):
        find_sources([str(tmp_path)])
    _write(tmp_path, "json")
    _write(tmp_path, "csv")
    with pytest.raises(DataError, match="mixes csv and json files"):
        find_sources([str(tmp_path)])


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("a.json", '{"a": 1}\n{"a": 2}\n', "name the file .jsonl: it has"),
        ("a.json", '{"data": [{"a": 1}], "version": 1}', "write the list `data` in it to a file of its own"),
        ("a.json", '{"a": 1}', "name the file .jsonl if"),
        ("a.jsonl", '[{"a": 1}]', "name the file .json if"),
    ],
)
def test_a_file_whose_ending_does_not_fit_its_content_is_told_what_to_do(
    tmp_path: Path, name: str, content: str, hint: str
) -> None:
    (tmp_path / name).write_text(content)
    (source,) = find_sources([str(tmp_path / name)])
    with pytest.raises(DataError) as caught:
        list(read_records(source))
    assert hint in caught.value.hint


RECORDS: dict[str, tuple[dict[str, Any], type]] = {
    "messages": ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, Conversation),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "system": "s"},
        Conversation,
    ),
    "alpaca": ({"instruction": "i", "input": "j", "output": "o"}, Completion),
    "prompt_completion": ({"prompt": "p", "completion": "c"}, Completion),
    "text": ({"text": "t"}, PlainText),
}


@pytest.mark.parametrize("layout", RECORDS)
def test_layouts_are_recognised_by_their_columns(layout: str) -> None:
    record, kind = RECORDS[layout]
    assert find_layout(record, {}, LAYOUTS) == layout
    assert isinstance(sample_of(record, layout), kind)


def test_alpaca_as_turns_and_as_text() -> None:
    sample = sample_of({"instruction": "i", "input": "j", "output": "o", "history": [["q", "a"]]}, "alpaca")
    assert isinstance(sample, Completion)
    assert [m["content"] for m in sample.conversation.messages] == ["q", "a", "i\nj", "o"]
    assert sample.prompt.endswith("### Instruction:\ni\n\n### Input:\nj\n\n### Response:\n")


def test_sharegpt_roles() -> None:
    call = '{"name": "add", "arguments": {"a": 2}}'
    values = {"human": "x", "function_call": call, "observation": "4", "gpt": "y"}
    turns = [{"from": name, "value": value} for name, value in values.items()]
    sample = sample_of({"conversations": turns}, "sharegpt")
    assert isinstance(sample, Conversation)
    assert [m["role"] for m in sample.messages] == ["user", "assistant", "tool", "assistant"]


def test_columns_by_other_names() -> None:
    columns = {"prompt": "question", "completion": "answer"}
    record = {"question": "q", "answer": "a"}
    assert find_layout(record, columns, LAYOUTS) == "prompt_completion"
    sample = sample_of(record, "prompt_completion", columns)
    assert isinstance(sample, Completion)
    assert (sample.prompt, sample.completion) == ("q", "a")


@pytest.mark.parametrize(
    ("record", "layout", "message"),
    [
        ({"prompt": "a"}, "prompt_completion", "row 1 has no column `completion` (columns: prompt)"),
        (
            {"prompt": "a", "completion": None},
            "prompt_completion",
            "row 1: column `completion` is null, not text",
        ),
        ({"conversations": [{"from": "cat", "value": "x"}]}, "sharegpt", "row 1: unknown role 'cat'"),
        ({"messages": []}, "messages", "row 1: `messages` is list []"),
    ],
)
def test_rows_that_do_not_fit(record: dict[str, Any], layout: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        sample_of(record, layout)
    assert message in caught.value.message
    assert caught.value.hint


def test_real_instruction_files_are_recognised(shared_data: Path) -> None:
    layouts = {}
    for name in ("alpaca_en_demo", "glaive_toolcall_en_demo", "identity"):
        (source,) = find_sources([str(shared_data / "instruct" / f"{name}.json")])
        samples = [(find_layout(record, {}, LAYOUTS), record, where) for where, record in read_records(source)]
        layouts[name] = {layout for layout, _, _ in samples}
        for layout, record, where in samples:
            sample_of(record, layout, where=where)
    assert layouts == {"alpaca_en_demo": {"alpaca"}, "glaive_toolcall_en_demo": {"sharegpt"}, "identity": {"alpaca"}}


@pytest.mark.parametrize(
    ("written", "said", "hint"),
    [
        (
            {"own": {"file_name": "own.json", "columns": {"prompt": "q"}}},
            "LLaMA-Factory's list of data sets",
            "own.json",
        ),
        ({"builder_name": "json", "features": {}}, "describes a data set that `datasets` has written", "to_parquet"),
    ],
)
def test_a_description_of_data_sets_is_no_data(written: dict[str, Any], said: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text('[{"text": "x"}]')
    (tmp_path / "dataset_info.json").write_text(json.dumps(written))
    for path in (tmp_path, tmp_path / "dataset_info.json"):
        with pytest.raises(DataError, match=said) as caught:
            find_sources([str(path)])
        assert hint in caught.value.hint
    assert len(find_sources([str(tmp_path / "own.json")])) == 1
