"""Gradients summed over ranks and forwards in fp32 are those of a plain sum; in bf16 they are rounded at each addition."""

import json
from pathlib import Path

import pytest

from tests.running import start, torchrun


@pytest.fixture(scope="module")
def found(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """What the worker wrote, all cases of one launch."""
    out = tmp_path_factory.mktemp("reduction") / "found.json"
    worker = Path(__file__).with_name("reduction_worker.py")
    done = start(torchrun(str(worker), str(models / "llama"), str(out)))
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(out.read_text()))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("what", ["whole", "offloaded", "lora"])
def test_a_sum_in_fp32_rounds_nothing(found: dict[str, dict[str, float]], what: str, stage: int) -> None:
    default, exact = (found[f"{what}-{stage}-{dtype}"] for dtype in ("auto", "fp32"))
    assert exact["apart"] < 1e-6
    assert default["apart"] > 1e-3
    assert exact["bytes"] == pytest.approx(2 * default["bytes"], rel=0.05)
