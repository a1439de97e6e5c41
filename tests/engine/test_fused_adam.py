"""DeepSpeed's FusedAdam, which every GPU run had never been tested with: steps, norms, resuming and exports equal the
plain loop's.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.running import start, torchrun

CELLS: dict[str, dict[str, Any]] = {
    f"stage {stage} {precision}": {
        "stage": stage,
        "precision": precision,
        "accumulation": 2,
        "packing": True,
        "max_grad_norm": 0.5,
    }
    for stage in range(4)
    for precision in ("fp32", "bf16", "fp16")
    if stage or precision != "fp16"
}
RESUMED = {f"resumed by torch's, {name}": CELLS[name] for name in CELLS if "fp32" in name}
FEW = ("stage 0 bf16", "stage 1 fp16", "resumed by torch's, stage 2 fp32")


def _checked(folder: Path, cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    (folder / "cells.json").write_text(json.dumps(cells))
    worker = Path(__file__).with_name("fused_adam_worker.py")
    done = start(torchrun(str(worker), str(folder), str(folder / "cells.json")))
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads((folder / "found.json").read_text()))


def test_fused_adam_equals_the_plain_loop(tmp_path: Path) -> None:
    found = _checked(tmp_path, {name: cell for name, cell in (CELLS | RESUMED).items() if name in FEW})
    assert [*found] == [name for name in CELLS | RESUMED if name in FEW]
    assert {name: one["text"] for name, one in found.items() if not one["is_equal"]} == {}


@pytest.mark.slow
def test_fused_adam_equals_the_plain_loop_at_every_stage_and_precision(tmp_path: Path) -> None:
    found = _checked(tmp_path, CELLS | RESUMED)
    assert {name: one["text"] for name, one in found.items() if not one["is_equal"]} == {}


@pytest.mark.slow
def test_fp16_without_zero_is_wrong_which_is_why_it_is_refused(tmp_path: Path) -> None:
    """The gradients are divided by a loss scale that was never applied."""
    cell = CELLS["stage 1 fp16"] | {"stage": 0}
    (found,) = _checked(tmp_path, {"stage 0 fp16": cell}).values()
    assert not found["is_equal"]
    assert found["norm"] > 0.99, "relative to the norm of the plain loop"
