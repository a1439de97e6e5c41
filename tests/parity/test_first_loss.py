"""The first loss of DPO is ln 2 in bf16 too: the reference's forwards are bit by bit those of training."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.pairwise import each_value
from tests.parity.four_bit import HAS_FOUR_BIT, WIDE, write_wide
from tests.parity.objective_cells import Layout, layouts
from tests.running import start, torchrun

WORKER = Path(__file__).with_name("first_loss_worker.py")
ALL = [
    replace(layout, cell=replace(layout.cell, precision="bf16"))
    for layout in layouts(worlds=(2,))
    if layout.cell.stage or layout.cell.sharing * layout.cell.ep == 1
]
if HAS_FOUR_BIT:
    ALL += [
        replace(layout, cell=replace(layout.cell, family=WIDE), quantize="nf4")
        for layout in ALL
        if layout.has_lora and layout.cell.stage < 3 and layout.cell.tp == 1
    ]
CHOSEN = each_value(
    ALL,
    lambda layout: (
        layout.cell.layout,
        layout.cell.family,
        layout.cell.stage,
        layout.cell.packing,
        layout.has_lora,
        layout.quantize,
    ),
)


@pytest.fixture(scope="module")
def with_wide(models: Path) -> Path:
    """The tiny models, and the wide one among them."""
    write_wide(models)
    return models


def _run(chosen: list[Layout], models: Path, out: Path) -> dict[str, dict[str, float]]:
    (out / "layouts.json").write_text(json.dumps([asdict(layout) for layout in chosen]))
    command = torchrun(str(WORKER), str(models), str(out / "found.json"), str(out / "layouts.json"))
    done = start(command, timeout=3600)
    assert done.returncode == 0, done.stderr[-9000:]
    found: dict[str, dict[str, float]] = json.loads((out / "found.json").read_text())
    return found


def _assert_first_loss(found: dict[str, dict[str, float]], chosen: list[Layout]) -> None:
    assert found.keys() == {layout.name for layout in chosen}
    for name, losses in found.items():
        assert losses["first"] == pytest.approx(math.log(2), rel=1e-12), name
        assert losses["margin"] == 0, name
        assert losses["second"] < math.log(2) - 1e-4, name


def test_the_first_loss_is_ln_2(with_wide: Path, tmp_path: Path) -> None:
    _assert_first_loss(_run(CHOSEN, with_wide, tmp_path), CHOSEN)


@pytest.mark.slow
def test_the_first_loss_is_ln_2_in_every_layout(with_wide: Path, tmp_path: Path) -> None:
    _assert_first_loss(_run(ALL, with_wide, tmp_path), ALL)
