"""Law 1: the gradient of a step and its loss equal those of a plain single-process loop, whatever the split."""

import itertools
from pathlib import Path

import pytest

from ds_finetune.selftest.cells import FAMILIES, Cell
from tests.parity.reference import WORLDS, assert_equals_plain_loop, found, is_for, run_cells


def _starts(family: str, stage: int) -> range:
    """Reductions of ZeRO-3 are looked at three times, for races."""
    return range(3 if stage == 3 and family == "deepseek_v3" else 1)


def _plain() -> list[Cell]:
    return [
        Cell(family, stage, accumulation, packing, start=start)
        for family, stage, accumulation, packing in itertools.product(FAMILIES, (0, 1, 2, 3), (1, 4), (False, True))
        for start in _starts(family, stage)
    ]


def _offloaded(*families: str) -> list[Cell]:
    places = ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "param"))
    return [
        Cell(family, stage, accumulation, packing, offload=offload, start=start)
        for family, (stage, offload), accumulation, packing in itertools.product(families, places, (1, 4), (False, True))
        for start in _starts(family, stage)
    ]


CLIPPED = [Cell("deepseek_v3", stage, 4, True, max_grad_norm=0.5, checkpointing=True) for stage in (0, 1, 2, 3)]
CELLS = _plain() + _offloaded("deepseek_v3") + CLIPPED
REST = _offloaded(*(family for family in FAMILIES if family != "deepseek_v3"))


def _pairs(cells: list[Cell]) -> list[tuple[Cell, int]]:
    return [(cell, world) for cell in cells for world in WORLDS if is_for(cell, world)]


def _ids(cells: list[Cell]) -> list[str]:
    return [f"{cell.name}-{world}" for cell, world in _pairs(cells)]


@pytest.fixture(scope="session")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every cell run, all of a world size in one launch."""
    out = tmp_path_factory.mktemp("parity")
    run_cells(CELLS, models, out)
    return out


@pytest.fixture(scope="session")
def rest(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the other families with offload."""
    out = tmp_path_factory.mktemp("parity-rest")
    run_cells(REST, models, out)
    return out


@pytest.mark.parametrize(("cell", "world"), _pairs(CELLS), ids=_ids(CELLS))
def test_cell_equals_plain_loop(cell: Cell, world: int, results: Path, models: Path) -> None:
    assert_equals_plain_loop(cell, found(cell, world, results), models)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), _pairs(REST), ids=_ids(REST))
def test_other_cell_equals_plain_loop(cell: Cell, world: int, rest: Path, models: Path) -> None:
    assert_equals_plain_loop(cell, found(cell, world, rest), models)
