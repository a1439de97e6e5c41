"""What is said of the data before a run: held-out rows that are trained on, splits that are left out."""

import json
from pathlib import Path
from typing import Any

from ds_finetune.config.schema import read_config
from ds_finetune.console import OUT, show_plan
from ds_finetune.plan.plan import make_plan
from ds_finetune.trainer.inputs import RunInputs
from ds_finetune.world import World
from tests.planning import prepared_run
from tests.running import ROWS, tiny_task


def inputs_of(folder: Path, **data: Any) -> tuple[RunInputs, str]:
    """The inputs of the tiny task, and what is printed of them."""
    config = read_config(tiny_task(folder, data=data))
    run = prepared_run(config, make_plan(config, world=World(0, 1, 0, 1, "a test"), device="cpu"))
    with OUT.capture() as shown:
        show_plan(run)
    return run.inputs, shown.get()


def test_held_out_rows_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    inputs, shown = inputs_of(tmp_path)
    assert inputs.notes == ()
    assert "held-out data" in shown
    train, held_out = (tmp_path / f"{name}.jsonl" for name in ("train", "eval"))
    repeated = held_out.read_text().splitlines()[:3]
    again = [json.dumps(json.loads(line) | {"id": 1}) for line in repeated]
    both = tmp_path / "both.jsonl"
    both.write_text("\n".join([*train.read_text().splitlines(), *again]))
    _, shown = inputs_of(tmp_path, train=str(both))
    assert (
        f"data.eval repeats training data: 3 of {ROWS} held-out documents have the tokens of a training document"
        in shown
    )


def test_a_stream_names_files_that_are_in_both(tmp_path: Path) -> None:
    inputs, shown = inputs_of(tmp_path, streaming=True, eval=str(tmp_path / "train.jsonl"))
    assert f"data.eval has training files: {tmp_path / 'train.jsonl'}" in shown
    before = inputs.train.fingerprint()
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text() + "\n")
    assert inputs.train.fingerprint() != before


def test_splits_that_are_left_out_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    tiny_task(tmp_path)
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").rename(folder / f"{name}.jsonl")
    inputs, shown = inputs_of(tmp_path, train=str(folder), eval=str(folder))
    assert f"data.train `{folder}`: split train is read, 1 of 2 files" in shown
    assert f"data.eval `{folder}`: split test is read, 1 of 2 files" in shown
    assert inputs.held_out is not None
