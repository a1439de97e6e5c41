"""Estimates of the number of rows."""

import json
from pathlib import Path

import pandas as pd
import pytest

from ds_finetune.config.units import MIB
from ds_finetune.data.sources import Source, estimate_rows


def test_lines_of_the_first_mib_stand_for_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    line = json.dumps({"text": "x" * 1000}) + "\n"
    path.write_text(line * (3 * MIB // len(line)))
    assert estimate_rows([Source(str(path), "jsonl")]) == pytest.approx(3 * MIB // len(line), rel=0.01)


def test_a_parquet_file_has_its_number_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pd.DataFrame({"text": ["a"] * 7}).to_parquet(path)
    assert estimate_rows([Source(str(path), "parquet")]) == 7
    assert estimate_rows([Source(str(path), "parquet")] * 2) == 14


def test_other_sources_tell_nothing(tmp_path: Path) -> None:
    damaged, plain = tmp_path / "rows.parquet", tmp_path / "rows.jsonl"
    damaged.write_text("no parquet")
    plain.write_text("{}\n")
    assert estimate_rows([Source(str(damaged), "parquet")]) == 0
    assert estimate_rows([Source("owner/name", "hub"), Source(str(plain), "jsonl")]) == 0
    assert estimate_rows([Source(str(tmp_path / "rows.jsonl.gz"), "jsonl")]) == 0
