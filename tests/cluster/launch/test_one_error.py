"""`ds-finetune launch` prints a mistake of the user once, although every rank meets it."""

import subprocess
import sys
from pathlib import Path

from ds_finetune.cli.demo import write_demo
from tests.conftest import ROOT


def test_an_error_of_every_rank_is_printed_once_without_a_culprit(tmp_path: Path) -> None:
    words = [
        str(write_demo(tmp_path / "demo")),
        "--nproc",
        "2",
        "data.train=/no/such.jsonl",
        f"output_dir={tmp_path}/run",
    ]
    command = [sys.executable, "-m", "ds_finetune", "launch", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert said.count("data file `/no/such.jsonl` does not exist") == said.count("hint: ") == 1
    assert "by the error above, with exit code 2" in said
    assert "first" not in said.partition("error: ")[2]
