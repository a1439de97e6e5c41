"""`data.rows` and a share as `data.eval`: which records of the training files are read, and what is refused."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.schema import read_config
from ds_finetune.config.sections import DataConfig
from ds_finetune.data.classes import find_classes
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.plan.settings import RunSettings
from tests.checking import check

FILES = (37, 1, 62)
"""Rows of the files; row i of all is the text `row i`."""
RUN = {"model": "m", "output_dir": "o"}


def _files(folder: Path) -> list[str]:
    number, folder = 0, folder / "data"
    folder.mkdir(exist_ok=True)
    for file, rows in enumerate(FILES):
        lines = (json.dumps({"text": f"row {number + row}"}) for row in range(rows))
        (folder / f"{file}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        number += rows
    return [str(folder / f"{file}.jsonl") for file in range(len(FILES))]


def _texts(rows: PreparedRows, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return sorted(tokenizer.decode(rows[number].input_ids, skip_special_tokens=True) for number in range(len(rows)))


def _prepared(
    folder: Path, tokenizer: PreTrainedTokenizerBase, purpose: str, *, seed: int = 0, **given: Any
) -> PreparedRows:
    tree = {"train": _files(folder), "cache_dir": str(folder / "cache"), "packing": False, "workers": 1} | given
    return prepare_rows(
        DataConfig.model_validate(tree), purpose, tokenizer=tokenizer, limits=TokenLimits(64, 128, seed=seed)
    )


def _all(rows: int = sum(FILES)) -> list[str]:
    return sorted(f"row {number}" for number in range(rows))


@pytest.mark.parametrize("share", ["5%", "12.5%", "30%", "50%", "66%"])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_block_of_rows_has_one_that_is_held_out(
    share: str, seed: int, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Both parts together are all rows, each once, and the parts of a share of 1 / n are one row of each n."""
    train, held_out = (
        _texts(_prepared(tmp_path, tokenizer, purpose, seed=seed, eval=share), tokenizer)
        for purpose in ("train", "eval")
    )
    assert sorted(train + held_out) == _all()
    # No more than one row is decided by where the last block is cut off.
    assert abs(len(held_out) - sum(FILES) * float(share[:-1]) / 100) < 1
    if share == "5%":
        assert sorted(int(text.split()[1]) // 20 for text in held_out) == [0, 1, 2, 3, 4]


def test_the_seed_draws(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    drawn = [
        tuple(_texts(_prepared(tmp_path, tokenizer, "eval", seed=seed, eval="10%"), tokenizer)) for seed in (0, 0, 1, 2)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_the_first_rows_of_all_files(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = _prepared(tmp_path, tokenizer, "train", rows=40)
    assert _texts(rows, tokenizer) == _all(40)
    assert rows.notes == ("data.rows: only the first 40 rows of data.train are read",)
    parts = [_prepared(tmp_path, tokenizer, purpose, rows=40, eval="10%") for purpose in ("train", "eval")]
    assert sorted(text for part in parts for text in _texts(part, tokenizer)) == _all(40)
    assert parts[1].notes == ("data.eval: 4 rows of data.train, drawn by train.seed 0, are not trained",)
    held_out = str(tmp_path / "data" / "2.jsonl")
    assert len(_prepared(tmp_path, tokenizer, "eval", rows=2, eval=held_out)) == FILES[2]
    for more in ({}, {"eval": "10%"}):
        rows = _prepared(tmp_path, tokenizer, "train", rows=1000, **more)
        assert rows.notes == ("data.rows: data.train has fewer than 1,000 rows, so all of them are read",)
    assert len(_prepared(tmp_path, tokenizer, "train", rows=1000)) == sum(FILES)


def test_rows_of_globs_and_folders(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A pattern and a folder name the same files, for training and for evaluation."""
    _files(tmp_path)
    for given in (str(tmp_path / "data" / "*.jsonl"), str(tmp_path / "data")):
        rows = [_prepared(tmp_path, tokenizer, purpose, train=given, eval=given) for purpose in ("train", "eval")]
        assert [len(part) for part in rows] == [sum(FILES)] * 2
    assert len(_prepared(tmp_path, tokenizer, "train", train=str(tmp_path / "data" / "[01].jsonl"))) == sum(FILES[:2])


def test_classes_are_those_of_the_rows_that_are_read(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}", "label": label} for number, label in enumerate("abc")]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tree = {"train": str(tmp_path / "a.jsonl"), "cache_dir": str(tmp_path / "cache")}
    kind = RowKind.of(read_config(RUN | {"data": tree, "objective": "classification"}).objective)
    found = [find_classes(DataConfig.model_validate(tree | {"rows": most}), kind).labels for most in (2, None)]
    assert found == [("a", "b"), ("a", "b", "c")]


@pytest.mark.parametrize(("share", "purpose", "seed"), [("1%", "eval", 0), ("99%", "train", 4)])
def test_a_share_that_gives_no_row(
    share: str, purpose: str, seed: int, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Of a single row either part is empty."""
    with pytest.raises(DataError, match=f"data.{purpose} has no row: .* rows, 1, to hold out {share} of them") as found:
        _prepared(tmp_path, tokenizer, purpose, rows=1, eval=share, seed=seed)
    assert found.value.hint == "give more rows, or name a file as data.eval"


def test_the_smallest_share_that_gives_a_row(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """One of 60 rows is 1.67% of them, whatever the seed draws; 1% is one of 100 rows, often none of these 60."""
    hints = []
    for seed in range(6):
        assert len(_prepared(tmp_path, tokenizer, "eval", rows=60, eval="1.67%", seed=seed)) == 1
        try:
            _prepared(tmp_path, tokenizer, "eval", rows=60, eval="1%", seed=seed)
        except DataError as found:
            hints.append((found.hint, found.message.partition("too few rows")[2]))
    assert 0 < len(hints) < 6
    hint = "set data.eval: 1.67% or more, or name a file as data.eval"
    assert set(hints) == {(hint, ", 60, to hold out 1% of them")}


@pytest.mark.parametrize(
    ("eval_", "message"),
    [
        ("100%", "it holds out all rows"),
        (0.05, "name files, or a share of data.train such as `5%`"),
        (100, "name files, or a share of data.train such as `5%`"),
        ({"new": "5%"}, "a share of data.train such as `5%` has no name, and no files beside it"),
        (["5%", "b.jsonl"], "a share of data.train such as `5%` has no name, and no files beside it"),
        ("0%", "`0%` holds out no rows; leave data.eval out"),
        ("0.0%", "`0.0%` holds out no rows; leave data.eval out"),
        ("5 %", "`5 %` is no share of data.train; write `5%`"),
        ("2,5 %", "`2,5 %` is no share of data.train; write `2.5%`"),
        ({"new": "5%.jsonl"}, ""),
    ],
)
def test_values_of_eval(eval_: object, message: str, tmp_path: Path) -> None:
    tree = RUN | {"data": {"train": "a.jsonl", "eval": eval_}}
    if message:
        with pytest.raises(ConfigError, match=message):
            read_config(tree)
    else:
        assert not read_config(tree).data.held_out_share


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"streaming": True, "rows": 5}, "data.streaming true with data.rows or a share as data.eval"),
        ({"streaming": True, "eval": "5%"}, "data.streaming true with data.rows or a share as data.eval"),
        ({"train": {"a": 0.5, "b": 0.5}, "rows": 5}, "data.rows 5 with weights of data.train"),
    ],
)
def test_what_counts_no_rows_is_refused(data: dict[str, Any], message: str) -> None:
    config = read_config(RUN | {"data": {"train": "a.jsonl"} | data})
    with pytest.raises(ConfigError, match=message):
        check(RunSettings.of(config), "objective")


def test_a_run_file_with_a_share_names_no_file(tmp_path: Path) -> None:
    config = read_config(RUN | {"data": {"train": "a.jsonl", "eval": "5%"}})
    assert config.data.held_out_share == Fraction(1, 20)
    assert [key for key, _ in config.inputs() if key == "data.eval"] == []
    again = read_config(config.model_dump(mode="json", by_alias=True))
    assert again.data.held_out_share == Fraction(1, 20)
