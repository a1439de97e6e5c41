"""The README's first command, from installation to the third answer."""

import json
import time
from pathlib import Path

import pytest

from tests.running import start


@pytest.mark.slow
def test_the_quickstart_learns_and_answers(tmp_path: Path) -> None:
    began = time.monotonic()
    done = start(["bash", "scripts/quickstart.sh", str(tmp_path / "quickstart")])
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 300
    records = [
        json.loads(line) for line in (tmp_path / "quickstart" / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    matches = [record["eval/exact_match"] for record in records if "eval/exact_match" in record]
    assert matches[0] < 0.5
    assert matches[-1] >= 0.9
    for question, answer in (
        ("1969-07-20", "20 July 1969"),
        ("1989-11-09", "9 November 1989"),
        ("2024-02-29", "29 February 2024"),
    ):
        assert f"> {question}\n{answer}\n" in done.stdout
