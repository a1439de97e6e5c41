"""Inputs of layers on the host change no bit, and tiled MLPs and fused operations only the order of sums, in every
layout."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finetune.families.table import FULLY_TESTED
from ds_finetune.plan.mesh import TESTED_LAYOUTS, ParallelLayout
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell
from tests.parity.reference import GRADIENT_TOLERANCE, LOSS_TOLERANCE, is_for, launch

PLAIN = ParallelLayout(frozenset(), (0, 1, 2, 3))
Case = tuple[Cell, bool]
"""A cell, and whether adapters are trained."""


def _case(family: str, row: ParallelLayout, stage: int, *, has_adapters: bool = False) -> Case:
    deep = f"{family}_deep"
    name = deep if {"pp", "ep"} <= row.axes and deep in TINY_MODELS else family
    cell = Cell(name, stage, 2, packing=True, max_grad_norm=0.5, checkpointing=True, **dict.fromkeys(row.axes, 2))
    return cell, has_adapters


def _row(*axes: str) -> ParallelLayout:
    return next(row for row in TESTED_LAYOUTS if row.axes == set(axes))


def _balanced(row: ParallelLayout, stage: int) -> Case:
    """With the balance loss and the updates of biases, which read the routers beside the tiles."""
    return replace(_case("deepseek_v3", row, stage)[0], balances=True), False


PAIRS = (("dpo", ("sp",), 2), ("orpo", ("pp",), 1), ("dpo", ("ep",), 3))


def _with_objective(name: str, row: ParallelLayout, stage: int) -> Case:
    """On pairs of answers, whose losses visit the head twice, after forwards without gradients."""
    return replace(_case("deepseek_v3", row, stage)[0], objective=name), False


FIRST = [_case("deepseek_v3", _row("sp", "ep"), 3)]
"""Compared by default."""
MATRIX = [
    _case("llama_deep", _row("pp"), 1),
    *(_case("deepseek_v3", PLAIN, stage, has_adapters=True) for stage in PLAIN.stages),
    *(_case("deepseek_v3", row, stage) for row in (PLAIN, *TESTED_LAYOUTS) for stage in row.stages),
    *(_case("llama", row, row.stages[-1]) for row in (PLAIN, *TESTED_LAYOUTS) if row.axes <= {"tp", "sp", "pp"}),
    *(_case(family, PLAIN, 3) for family in FULLY_TESTED if family not in ("deepseek_v3", "llama")),
    *(_with_objective(name, _row(*axes), stage) for name, axes, stage in PAIRS),
    *(_balanced(_row(*axes), stage) for axes, stage in ((("ep",), 2), (("sp",), 3), (("pp",), 1))),
    *(_case("llama", PLAIN, stage, has_adapters=True) for stage in PLAIN.stages),
    *(
        (replace(_case(f"{family}_deep", _row("pp"), stage)[0], vpp=2), False)
        for family, stage in (("deepseek_v3", 0), ("deepseek_v3", 1), ("llama", 1))
    ),
]


def _id(case: Case) -> str:
    return f"{case[0].name}-{case[1]}"


@dataclass(frozen=True)
class _Given:
    """What the worker gets of a case."""

    cell: Cell
    has_adapters: bool


def _run(cases: list[Case], models: Path, out: Path) -> Path:
    """Each case on two ranks, or on four or eight where it needs them."""
    worlds = [next(world for world in (2, 4, 8) if is_for(cell, world)) for cell, _ in cases]
    runs = [(_Given(*case), world) for case, world in zip(cases, worlds, strict=True)]
    return launch("activation_worker.py", runs, models, out)


@pytest.fixture(scope="module")
def first(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(FIRST, models, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [item.name for item in request.session.items]
    asked = [case for case in MATRIX if any(name.endswith(f"[{_id(case)}]") for name in names)]
    return _run(asked, models, tmp_path_factory.mktemp("matrix"))


def _compare(case: Case, out: Path) -> None:
    found = torch.load(out / f"{_id(case)}.pt", weights_only=True)
    plain, offloaded, tiled = (found[name] for name in ("plain", "offloaded", "tiled"))
    for same in (offloaded, found["selective"]):
        assert same["losses"] == plain["losses"]
        assert same["norms"] == plain["norms"]
        for part in ("gradients", "weights"):
            assert same[part].keys() == plain[part].keys()
            assert all(torch.equal(same[part][name], tensor) for name, tensor in plain[part].items())
    for close in (tiled, found["fused"], found["fused and tiled"]):
        assert close["losses"] == pytest.approx(plain["losses"], rel=LOSS_TOLERANCE, abs=LOSS_TOLERANCE)
        assert close["norms"] == pytest.approx(plain["norms"], rel=GRADIENT_TOLERANCE)
        _assert_gradients_close(close["gradients"], plain["gradients"])


def _assert_gradients_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error < GRADIENT_TOLERANCE, (name, float(error))


@pytest.mark.parametrize("case", FIRST, ids=_id)
def test_first_layouts(case: Case, first: Path) -> None:
    _compare(case, first)


@pytest.mark.slow
@pytest.mark.parametrize("case", MATRIX, ids=_id)
def test_every_layout(case: Case, matrix: Path) -> None:
    _compare(case, matrix)
