"""Saving takes little memory, whatever the size of the state."""

import json
import re
import sys
from pathlib import Path

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.units import GIB
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer import resume
from tests.running import start, tiny_task

BUFFER = 16 * 2**20


def test_a_save_holds_two_tensors_and_a_buffer_beyond_the_copy(tmp_path: Path) -> None:
    done = start([sys.executable, str(Path(__file__).with_name("memory_worker.py")), str(tmp_path)], fork=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("FOUND")).removeprefix("FOUND")
    )
    bound = 2 * found["largest"] + BUFFER
    assert found["bytes"] > 20 * bound
    assert found["False"]["extra"] <= bound, found
    assert found["True"]["extra"] <= found["bytes"] + bound, found


@pytest.mark.parametrize(
    ("gib", "asynchronous", "is_refused"), [(23, True, True), (24, True, False), (23, False, False)]
)
def test_a_copy_that_the_host_cannot_hold_is_refused_before_the_first_step(
    gib: int, asynchronous: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would end the process without a word, at the first save; a control group's limit counts too."""
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "checkpoint": {"asynchronous": asynchronous}}
    plan = make_plan(RunSettings.of(RunConfig.model_validate(tree)), world=World(0, 2, 0, 2, "test"), device="cuda")
    monkeypatch.setattr(resume, "available_bytes", lambda: gib * GIB)
    error = resume._memory_error(12 * GIB, plan)
    assert (error is not None) == is_refused
    assert error is None or "needs 24.00 GiB" in error.message


REFUSED = """
import sys

import ds_finetune
from ds_finetune.errors import OutputError
from ds_finetune.trainer import resume

resume.available_bytes = lambda: 0
try:
    ds_finetune.train(sys.argv[1])
except OutputError as refused:
    print(refused.message)
"""


def test_a_run_asks_before_its_first_step(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(REFUSED)
    done = start([sys.executable, str(program), str(tiny_task(tmp_path))])
    assert re.search(r"checkpoint.asynchronous needs (?!0.00)[\d.]* [KM]iB of memory", done.stdout), (
        done.stdout + done.stderr
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
