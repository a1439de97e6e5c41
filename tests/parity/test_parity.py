"""Law 1: the gradient of a step and its loss equal those of a plain single-process loop, whatever the split."""

import itertools
from pathlib import Path

import pytest

from ds_finetune.selftest.cells import FAMILIES, Cell
from tests.parity.reference import WORLDS, assert_equals_plain_loop, found, is_for, run_cells


def _starts(family: str, stage: int) -> range:
    """Reductions of ZeRO-3 are looked at three times, for races."""
    return range(3 if stage == 3 and family == "deepseek_v3" else 1)


def _cells() -> list[Cell]:
    plain = [
        Cell(family, stage, accumulation, packing, start=start)
        for family, stage, accumulation, packing in itertools.product(FAMILIES, (0, 1, 2, 3), (1, 4), (False, True))
        for start in _starts(family, stage)
    ]
    offloaded = [
        Cell(family, stage, accumulation, packing, offload=offload, start=start)
        for family, (stage, offload), accumulation, packing in itertools.product(
            FAMILIES, ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "param")), (1, 4), (False, True)
        )
        for start in _starts(family, stage)
    ]
    clipped = [Cell("deepseek_v3", stage, 4, True, max_grad_norm=0.5, checkpointing=True) for stage in (0, 1, 2, 3)]
    return plain + offloaded + clipped


CELLS = _cells()
PAIRS = [(cell, world) for cell in CELLS for world in WORLDS if is_for(cell, world)]


@pytest.fixture(scope="session")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every cell run, all of a world size in one launch."""
    out = tmp_path_factory.mktemp("parity")
    run_cells(CELLS, models, out)
    return out


@pytest.mark.parametrize(("cell", "world"), PAIRS, ids=[f"{cell.name}-{world}" for cell, world in PAIRS])
def test_cell_equals_plain_loop(cell: Cell, world: int, results: Path, models: Path) -> None:
    assert_equals_plain_loop(cell, found(cell, world, results), models)
