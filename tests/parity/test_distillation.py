"""Distillation from a live teacher and from stored scores equals a plain loop over unpadded rows, whatever the split."""

from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finetune.reference.selftest.cells import Cell
from tests.pairwise import each_value, pairwise
from tests.parity.distillation import Distilled, data_parallel, plain_distillation, write_models
from tests.parity.reference import ids_of, is_for, launch, relative

FAMILIES = ("qwen2", "deepseek_v3")
DEEP = ("qwen2_deep",)
Run = tuple[Distilled, int]

ALL: list[Run] = [(distilled, world) for distilled in data_parallel(FAMILIES) for world in (1, 2, 3)]
SHARED: list[Run] = [
    (Distilled(Cell(family, stage, 1, packing, **{axis: 2}), source, temperature, 0.3), 2)
    for family, axis in (("qwen2", "tp"), ("qwen2", "sp"), ("deepseek_v3", "ep"))
    for stage, packing in ((1, True), (3, False))
    for source, temperature in (("live", 2.0), ("stored", 1.0))
]
"""Vocabulary, tokens or experts divided among two ranks."""
SHARED += [
    (Distilled(Cell("qwen2", stage, accumulation, stage == 0, pp=2), source, temperature, 0.3), 2)
    for stage, accumulation in ((0, 4), (1, 1))
    for source, temperature in (("live", 2.0), ("stored", 1.0))
]
"""Layers too."""
INTERLEAVED: list[Run] = [
    (Distilled(Cell("qwen2_deep", stage, accumulation, stage == 0, pp=2, vpp=2), source, temperature, 0.3), 2)
    for stage, accumulation in ((0, 4), (1, 2))
    for source, temperature in (("live", 2.0), ("stored", 1.0))
]


def _axes(run: Run) -> tuple[Hashable, ...]:
    distilled, world = run
    cell = distilled.cell
    return cell.stage, cell.accumulation, cell.packing, distilled.source, distilled.temperature, world


def _shared_axes(run: Run) -> tuple[Hashable, ...]:
    return (run[0].cell.layout, run[0].source), run[0].cell.stage, run[0].cell.packing


ADAPTED: list[Run] = [
    (Distilled(Cell(family, stage, 2, True), source, 1.0, 0.3, has_adapters=True), world)
    for family, stage, source, world in (
        ("qwen2", 2, "live", 2),
        ("deepseek_v3", 3, "stored", 1),
        ("qwen2", 3, "live", 2),
        ("deepseek_v3", 0, "offloaded", 1),
    )
]
CHOSEN = [*pairwise(ALL, _axes), *each_value(SHARED, _shared_axes), *ADAPTED[:2]]
REST = [run for run in [*ALL, *SHARED, *INTERLEAVED, *ADAPTED] if run not in CHOSEN]
ROUNDED: list[Run] = [
    (Distilled(Cell("qwen2", stage, 2, True, precision="bf16", checkpointing=True), source, 2.0, 0.3), 2)
    for stage, source in ((1, "live"), (2, "offloaded"))
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("distillation")
    write_models(made, (*FAMILIES, *DEEP))
    return made


@pytest.fixture(scope="session")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch("distill_worker.py", [*CHOSEN, *ROUNDED], folder, tmp_path_factory.mktemp("distilled"))


@pytest.fixture(scope="session")
def rest(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch("distill_worker.py", REST, folder, tmp_path_factory.mktemp("distilled-rest"))


@cache
def _plain_loop(folder: Path, distilled: Distilled) -> dict[str, Any]:
    return plain_distillation(folder, distilled)


def _wanted(folder: Path, distilled: Distilled) -> dict[str, Any]:
    source = "stored" if distilled.source == "stored" else "live"
    return _plain_loop(folder, replace(distilled, cell=Cell(distilled.cell.family, 0, 1, False), source=source))


def assert_equals_plain_loop(run: Run, folder: Path, out: Path) -> None:
    """Loss, its parts, norm and the gradient of every parameter in the first step, and the losses of the others, which
    have to do for adapters.
    """
    distilled, world = run
    found = torch.load(out / f"{distilled.name}-world={world}.pt", weights_only=True)
    wanted = _wanted(folder, distilled)
    assert found["losses"][0] == pytest.approx(wanted["losses"][0], rel=1e-6, abs=1e-6)
    for name, value in wanted["metrics"].items():
        assert found["metrics"][name] == pytest.approx(value, rel=1e-6, abs=1e-6)
        assert found["evaluated"][name] == pytest.approx(value, rel=1e-6, abs=1e-6)
    assert found["norms"][0] == pytest.approx(wanted["norms"][0], rel=1e-4)
    assert found["losses"][1:] == pytest.approx(wanted["losses"][1:], rel=1e-4)
    if distilled.has_adapters:
        return
    assert found["gradients"].keys() == wanted["gradients"].keys()
    errors = {name: relative(found["gradients"][name], grad) for name, grad in wanted["gradients"].items()}
    assert not {name: error for name, error in errors.items() if error > 1e-4}


@pytest.mark.parametrize("run", CHOSEN, ids=ids_of(CHOSEN))
def test_distillation_equals_plain_loop(run: Run, results: Path, folder: Path) -> None:
    assert_equals_plain_loop(run, folder, results)


@pytest.mark.parametrize("run", ROUNDED, ids=ids_of(ROUNDED))
def test_in_bf16_the_losses_differ_by_rounding_alone(run: Run, results: Path, folder: Path) -> None:
    found = torch.load(results / f"{run[0].name}-world={run[1]}.pt", weights_only=True)
    assert found["losses"] == pytest.approx(_wanted(folder, run[0])["losses"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("run", REST, ids=ids_of(REST))
def test_other_distillation_equals_plain_loop(run: Run, rest: Path, folder: Path) -> None:
    assert_equals_plain_loop(run, folder, rest)


def test_every_number_of_ranks_shares_the_rows() -> None:
    assert all(is_for(distilled.cell, world) for distilled, world in [*CHOSEN, *REST])
