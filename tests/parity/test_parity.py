"""Law 1: the gradient of a step and its loss equal those of a plain single-process loop, whatever the split."""

import itertools
from collections.abc import Hashable
from pathlib import Path

import pytest

from ds_finetune.families.table import FAMILIES as TABLE
from ds_finetune.reference.selftest.cells import Cell
from tests.pairwise import pairwise
from tests.parity.reference import Run, assert_equals_plain_loop, ids_of, result_of, run_cells, runs_asked_for, runs_of

FAMILIES = ("deepseek_v3", "qwen2", "llama")


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
        for family, (stage, offload), accumulation, packing in itertools.product(
            families, places, (1, 4), (False, True)
        )
        for start in _starts(family, stage)
    ]


CLIPPED = [
    Cell("deepseek_v3", stage, 4, True, max_grad_norm=0.5, checkpointing=True, offload=offload)
    for stage, offload in [*((stage, "none") for stage in (0, 1, 2, 3)), *((stage, "optimizer") for stage in (1, 2, 3))]
]
ALL = runs_of(_plain() + _offloaded(*FAMILIES) + CLIPPED)


def _axes(run: Run) -> tuple[Hashable, ...]:
    cell, world = run
    return cell.family, cell.stage, cell.accumulation, cell.packing, cell.offload, cell.checkpointing, cell.start, world


CHOSEN = pairwise(ALL, _axes)
"""Every pair of values of two axes; the full product is behind the marker."""
OTHERS = [
    Cell(name, stage, 4, packing)
    for name, family in TABLE.items()
    if family.tiny_models and name not in FAMILIES
    for stage, packing in itertools.product((0, 1, 2, 3), (False, True))
]
"""The other families of the table, compared behind the marker alone."""
REST = [run for run in ALL if run not in CHOSEN] + runs_of(OTHERS)


@pytest.fixture(scope="session")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cells(CHOSEN, models, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="session")
def rest(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cells(runs_asked_for(request, REST), models, tmp_path_factory.mktemp("parity-rest"))


@pytest.mark.parametrize(("cell", "world"), CHOSEN, ids=ids_of(CHOSEN))
def test_cell_equals_plain_loop(cell: Cell, world: int, results: Path, models: Path) -> None:
    assert_equals_plain_loop(cell, result_of(cell, world, results), models)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), REST, ids=ids_of(REST))
def test_other_cell_equals_plain_loop(cell: Cell, world: int, rest: Path, models: Path) -> None:
    assert_equals_plain_loop(cell, result_of(cell, world, rest), models)
