"""`metrics.jsonl` is read while it is written, cut short, replaced, damaged or of another program."""

import json
from pathlib import Path

import numpy as np
import pytest

from ds_finetune.runs import metrics
from ds_finetune.runs.metrics import MetricsReader


def _line(step: int, **values: object) -> str:
    return json.dumps({"step": step, **values}) + "\n"


def test_reads_only_whole_lines_and_continues_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    reader.update()
    whole, torn = _line(1, **{"train/loss": 2.5}), _line(2, **{"train/loss": 2.0, "eval/loss": 3.0})
    path.write_text(whole + torn[:20])
    reader.update()
    assert reader.curves["train/loss"].values.tolist() == [2.5]
    with path.open("a") as file:
        file.write(torn[20:])
    reader.update()
    assert reader.curves["train/loss"].values.tolist() == [2.5, 2.0]
    assert (reader.curves["eval/loss"].steps.tolist(), reader.last_step, reader.problem) == ([2], 2, "")


def test_null_is_a_gap_and_notices_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        _line(1, **{"train/loss": None, "non_finite": ["train/loss"], "notice": "rank 1", "slow": "rank 0"})
    )
    reader = MetricsReader(path)
    reader.update()
    assert reader.slow == [(1, "rank 0")]
    assert np.isnan(reader.curves["train/loss"].values).tolist() == [True]
    assert (reader.notices, list(reader.curves)) == ([(1, "rank 1")], ["train/loss"])


def test_a_replaced_or_shortened_file_is_read_again(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.aside"
    path.write_text(_line(1, loss=1.0) + _line(2, loss=2.0))
    reader = MetricsReader(path)
    reader.update()
    other.write_text(_line(1, loss=1.0) + _line(2, loss=7.0) + _line(3, loss=8.0))
    other.rename(path)
    reader.update()
    assert reader.curves["loss"].values.tolist() == [1.0, 7.0, 8.0]
    path.write_text(_line(1, loss=1.0))
    reader.update()
    assert reader.curves["loss"].values.tolist() == [1.0]
    path.unlink()
    reader.update()
    assert reader.curves == {}


def test_a_file_that_was_replaced_and_has_its_inode_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(_line(1, loss=1.0) + _line(2, loss=2.0))
    reader = MetricsReader(path)
    reader.update()
    inode = path.stat().st_ino
    path.write_text(_line(1, loss=7.0) + _line(2, loss=7.5) + _line(3, loss=8.0))
    assert path.stat().st_ino == inode
    reader.update()
    assert reader.curves["loss"].values.tolist() == [7.0, 7.5, 8.0]


def test_what_is_no_record_is_told_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('[1]\n{"loss": 1}\n\xff\n' + _line(1, loss=1.0, later={"a": 1}) + '{"step": "x"}\n')
    reader = MetricsReader(path)
    reader.update()
    assert (list(reader.curves), reader.last_step) == (["loss"], 1)
    assert "4 of 5 lines of metrics.jsonl are no records of a step" in reader.problem


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MOST_LINE_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 1000)
    reader = MetricsReader(path)
    reader.update()
    assert "line 1 of metrics.jsonl has more than 100 bytes" in reader.problem
