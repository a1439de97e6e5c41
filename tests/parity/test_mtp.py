"""Multi-token prediction takes the steps of a plain loop over unpadded documents, in every layout.

The loop uses the modules of transformers' `MtpModel`; the layer is given the weights by their published names.
"""

import itertools
import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ds_finetune.plan.combinations import TESTED_LAYOUTS
from ds_finetune.selftest.cells import Cell
from tests.pairwise import pairwise
from tests.parity.mtp_cells import MtpLayout, plain_steps, write_mtp_model
from tests.parity.reference import GRADIENT_TOLERANCE, LOSS_TOLERANCE, is_for, relative
from tests.running import start, torchrun

WORKER = Path(__file__).with_name("mtp_worker.py")
FAMILY = "deepseek_v3"
MODELS = ("deepseek_v3", "deepseek_v3_deep")


def _cells() -> list[Cell]:
    plain = [
        Cell(FAMILY, stage, accumulation, packing=packing, offload=offload, checkpointing=packing)
        for stage, accumulation, packing in itertools.product(range(4), (1, 2), (True, False))
        for offload in ("none", "optimizer")
        if stage or offload == "none"
    ]
    shared = [
        Cell(_deep_enough(row.axes), stage, 2, packing=packing, checkpointing=packing, **dict.fromkeys(row.axes, 2))
        for row in TESTED_LAYOUTS
        if FAMILY in row.families
        for stage, packing in itertools.product(row.stages, (True, False))
    ]
    return [replace(cell, max_grad_norm=0.5 if cell.packing else 0.0, weight_decay=0.1) for cell in [*plain, *shared]]


def _deep_enough(axes: frozenset[str]) -> str:
    return "deepseek_v3_deep" if {"pp", "ep"} <= axes else FAMILY


ALL = [
    MtpLayout(cell, world, detach)
    for cell, world, detach in itertools.product(_cells(), (1, 2, 4), (True, False))
    if is_for(cell, world) and (detach or cell.pp == 1)
]


def _axes(layout: MtpLayout) -> tuple[Hashable, ...]:
    cell = layout.cell
    return cell.layout, cell.stage, cell.packing, cell.accumulation, cell.offload, layout.detach, layout.world


CHOSEN = pairwise([layout for layout in ALL if layout.world < 4], _axes)
"""Every pair of values of two axes; the full product is behind the marker."""
REST = [layout for layout in ALL if layout not in CHOSEN]


@pytest.fixture(scope="session")
def mtp_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp-models")
    for family in MODELS:
        write_mtp_model(family, folder / family)
    return folder


def _run(chosen: Sequence[MtpLayout], models: Path, out: Path) -> Path:
    for world in sorted({layout.world for layout in chosen}):
        given = [asdict(layout) for layout in chosen if layout.world == world]
        (out / "layouts.json").write_text(json.dumps(given))
        done = start(torchrun(str(WORKER), str(models), str(out), str(out / "layouts.json"), ranks=world), timeout=3600)
        assert done.returncode == 0, done.stderr[-9000:]
    return out


@pytest.fixture(scope="session")
def results(mtp_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(CHOSEN, mtp_models, tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="session")
def rest(mtp_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(REST, mtp_models, tmp_path_factory.mktemp("mtp-rest"))


def _assert_equals_plain_loop(layout: MtpLayout, folder: Path, models: Path) -> None:
    found, cell = torch.load(folder / f"{layout.name}.pt", weights_only=True), layout.cell
    wanted = plain_steps(
        models / cell.family, detach=layout.detach, max_grad_norm=cell.max_grad_norm, weight_decay=cell.weight_decay
    )
    first = found["metrics"][0]
    for metrics in (first, found["eval"]):
        assert metrics["loss"] == pytest.approx(wanted.losses[0], abs=LOSS_TOLERANCE)
        assert metrics["mtp_loss"] == pytest.approx(wanted.mtp_losses[0], abs=LOSS_TOLERANCE)
        assert metrics["mtp_accuracy"] == pytest.approx(wanted.mtp_accuracies[0], abs=1e-9)
    assert found["norms"] == pytest.approx(wanted.norms, rel=GRADIENT_TOLERANCE)
    assert found["gradients"].keys() == wanted.gradients.keys()
    errors = {name: relative(found["gradients"][name], grad) for name, grad in wanted.gradients.items()}
    assert max(errors.values()) < GRADIENT_TOLERANCE, errors
    for name, steps in (("loss", wanted.losses), ("mtp_loss", wanted.mtp_losses)):
        assert [metrics[name] for metrics in found["metrics"]] == pytest.approx(steps, rel=1e-4), name
    if layout.detach:
        different = [
            name for name, tensor in found["without"].items() if not torch.equal(tensor, found["weights"][name])
        ]
        assert not different
        assert len(found["without"]) < len(found["weights"])


@pytest.mark.parametrize("layout", CHOSEN, ids=[layout.name for layout in CHOSEN])
def test_layer_equals_plain_loop(layout: MtpLayout, results: Path, mtp_models: Path) -> None:
    _assert_equals_plain_loop(layout, results, mtp_models)


@pytest.mark.slow
@pytest.mark.parametrize("layout", REST, ids=[layout.name for layout in REST])
def test_layer_equals_plain_loop_in_other_layouts(layout: MtpLayout, rest: Path, mtp_models: Path) -> None:
    _assert_equals_plain_loop(layout, rest, mtp_models)
