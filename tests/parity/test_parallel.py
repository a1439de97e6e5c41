"""Every layout that may be trained takes the steps of a plain single-process loop."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.plan.legal import FAMILIES, PROVEN, Proven
from ds_finetune.selftest.cells import Cell
from tests.parity.reference import WORLDS, assert_equals_plain_loop, found, is_for, plain_loop, run_cells

FIRST = ("deepseek_v3", "llama")
"""Families compared by default; the others are behind the marker."""


def _cells(families: tuple[str, ...]) -> list[Cell]:
    return [
        Cell(
            _deep_enough(family, row),
            stage,
            2,
            packing=packing,
            max_grad_norm=0.5 if packing else 0.0,
            checkpointing=packing,
            **dict.fromkeys(row.axes, 2),
        )
        for row, family in itertools.product(PROVEN, families)
        if family.removesuffix("_lite") in row.families
        for stage, packing in itertools.product(row.stages, (True, False))
    ]


def _deep_enough(family: str, row: Proven) -> str:
    """Stages that share out experts need some each; the first layer has none."""
    return f"{family}_deep" if {"pp", "ep"} <= row.axes else family


def _offloaded() -> list[Cell]:
    places = ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "param"))
    return [
        Cell(_deep_enough("deepseek_v3", row), stage, 2, packing=True, offload=offload, max_grad_norm=0.5, **dict.fromkeys(row.axes, 2))
        for row in PROVEN
        for stage, offload in places
        if stage in row.stages
    ]


def _rounded() -> list[Cell]:
    return [
        Cell(_deep_enough("deepseek_v3", row), stage, 2, packing=True, precision="bf16", **dict.fromkeys(row.axes, 2))
        for row in PROVEN
        for stage in row.stages
        if stage or row.axes == {"sp"}
    ]


FOUR_STAGES = [Cell("llama_deep", 1, 4, packing=True, pp=4), Cell("llama_deep", 0, 1, packing=True, max_grad_norm=0.5, pp=4, pp_layers="2 1 1 1")]
TIED = [
    Cell("qwen2", stage, 2, packing=True, offload=offload, max_grad_norm=0.5, pp=2) for stage, offload in ((0, "none"), (1, "none"), (1, "optimizer"))
]
"""The embedding is on the first stage, the head that shares its weight on the last."""
CELLS = _cells(FIRST) + _offloaded() + TIED
ROUNDED = _rounded()
REST = [cell for cell in _cells((*(family for family in FAMILIES if family not in FIRST), "deepseek_v2_lite")) if "lite_deep" not in cell.family]
REST += FOUR_STAGES
"""V2-Lite has no latent queries: one projection from the hidden states to the heads."""


def _pairs(cells: list[Cell], worlds: tuple[int, ...]) -> list[tuple[Cell, int]]:
    return [(cell, world) for cell in cells for world in worlds if is_for(cell, world)]


def _ids(pairs: list[tuple[Cell, int]]) -> list[str]:
    return [f"{cell.layout}-z{cell.stage}-{cell.offload}-{cell.family}-{'packed' if cell.packing else 'padded'}-{world}" for cell, world in pairs]


@pytest.fixture(scope="session")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cells run, all of a world size in one launch."""
    out = tmp_path_factory.mktemp("parallel")
    run_cells(CELLS + ROUNDED, models, out)
    return out


@pytest.fixture(scope="session")
def rest(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The other families on two ranks, and all on four, where there are data parallel ranks beside."""
    out = tmp_path_factory.mktemp("parallel-rest")
    run_cells(REST, models, out)
    run_cells(CELLS + REST + ROUNDED, models, out, worlds=(4,))
    return out


@pytest.mark.parametrize(("cell", "world"), _pairs(CELLS, WORLDS), ids=_ids(_pairs(CELLS, WORLDS)))
def test_layout_equals_plain_loop(cell: Cell, world: int, results: Path, models: Path) -> None:
    assert_equals_plain_loop(cell, found(cell, world, results), models)


def _assert_follows_fp32(cell: Cell, result: dict[str, Any], models: Path) -> None:
    """bf16 weights round the losses in the third digit; a gradient left out would show in the second."""
    wanted = plain_loop(models / cell.family, cell.max_grad_norm)
    assert result["losses"] == pytest.approx(wanted["losses"], abs=1.5e-2)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=2e-2)


@pytest.mark.parametrize(("cell", "world"), _pairs(ROUNDED, WORLDS), ids=_ids(_pairs(ROUNDED, WORLDS)))
def test_layout_in_bf16_follows_fp32(cell: Cell, world: int, results: Path, models: Path) -> None:
    _assert_follows_fp32(cell, found(cell, world, results), models)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), _pairs(ROUNDED, (4,)), ids=_ids(_pairs(ROUNDED, (4,))))
def test_other_layout_in_bf16_follows_fp32(cell: Cell, world: int, rest: Path, models: Path) -> None:
    _assert_follows_fp32(cell, found(cell, world, rest), models)


REST_PAIRS = _pairs(REST, WORLDS) + _pairs(CELLS + REST, (4,))


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), REST_PAIRS, ids=_ids(REST_PAIRS))
def test_other_layout_equals_plain_loop(cell: Cell, world: int, rest: Path, models: Path) -> None:
    assert_equals_plain_loop(cell, found(cell, world, rest), models)
