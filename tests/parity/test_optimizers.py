"""Every optimizer that may be named takes the steps of its published rule, at each ZeRO stage and offload it is legal
with.
"""

from pathlib import Path

import pytest

from ds_finetune.reference.selftest.cells import Cell
from tests.pairwise import pairwise
from tests.parity.reference import Run, reference_steps, result_of, run_cells, runs_of
from tests.running import EAGER


def _cells(names: dict[str, list[tuple[int, str]]]) -> list[Cell]:
    return [
        Cell(
            "deepseek_v3",
            stage,
            1,
            packing=True,
            offload=offload,
            optimizer=name,
            weight_decay=0.0 if name in ("Adagrad", "Adamax", "RMSprop") else 0.1,
        )
        for name, places in names.items()
        for stage, offload in places
    ]


EVERY_STAGE = [(stage, "none") for stage in (0, 1, 2, 3)]
OFFLOADED = [(stage, "optimizer") for stage in (1, 2, 3)]
CELLS = _cells(
    {
        "AdamW": EVERY_STAGE + OFFLOADED,
        "Adam": [(0, "none"), (3, "none"), (2, "optimizer")],
        "SGD": EVERY_STAGE,
        "Adagrad": [(0, "none")],
        "RAdam": EVERY_STAGE,
        "Adamax": EVERY_STAGE,
        "RMSprop": EVERY_STAGE,
        "Adafactor": [(0, "none")],
        "AdamW8bit": [(0, "none")],
        "Muon": EVERY_STAGE + OFFLOADED,
    }
)
COMPILED = _cells({"Adagrad": OFFLOADED, "Lion": OFFLOADED})
"""Their CPU kernels are compiled for minutes at first use."""


CHOSEN = pairwise(runs_of(CELLS), lambda run: (run[0].optimizer, run[0].stage, run[0].offload, run[1]))
"""Every pair of values of two axes; the full product is behind the marker."""
REST = [run for run in runs_of(CELLS + COMPILED) if run not in CHOSEN]


def _ids(runs: list[Run]) -> list[str]:
    return [f"{cell.optimizer}-{cell.stage}-{cell.offload}-{world}" for cell, world in runs]


@pytest.fixture(scope="session")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Muon as it is written, which torch compiles for seven seconds on each rank behind the marker."""
    return run_cells(CHOSEN, models, tmp_path_factory.mktemp("optimizers"), environ=EAGER)


@pytest.fixture(scope="session")
def rest(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cells(REST, models, tmp_path_factory.mktemp("optimizers-rest"))


@pytest.mark.parametrize(("cell", "world"), CHOSEN, ids=_ids(CHOSEN))
def test_optimizer_follows_its_rule(cell: Cell, world: int, results: Path, models: Path) -> None:
    _compare(cell, world, results, models)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), REST, ids=_ids(REST))
def test_other_optimizer_follows_its_rule(cell: Cell, world: int, rest: Path, models: Path) -> None:
    _compare(cell, world, rest, models)


def _compare(cell: Cell, world: int, out: Path, models: Path) -> None:
    wanted = reference_steps(models / cell.family, optimizer_name=cell.optimizer, weight_decay=cell.weight_decay)
    assert wanted["losses"][2] < wanted["losses"][0] - 1e-3, "three steps must tell optimizers apart"
    assert result_of(cell, world, out)["losses"] == pytest.approx(wanted["losses"], rel=2e-6)
