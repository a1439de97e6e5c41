"""Multi-token prediction takes the steps of a plain loop over unpadded documents, in every layout.

The loop uses the modules of transformers' `MtpModel`; the layer is given the weights by their published names.
"""

import itertools
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finetune.plan.mesh import TESTED_LAYOUTS
from ds_finetune.reference.selftest.cells import Cell
from tests.pairwise import pairwise
from tests.parity.choices import NEAREST
from tests.parity.mtp_cells import MtpLayout, PlainSteps, plain_steps, write_mtp_model
from tests.parity.reference import GRADIENT_TOLERANCE, LOSS_TOLERANCE, asked_for, is_for, launch, relative

FAMILY = "deepseek_v3"
MODELS = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "deepseek_v4")
WIDE, WIDE_SIZES = "deepseek_v3_wide", {"hidden_size": 64, "q_lora_rank": 64, "intermediate_size": 64}
"""A model of which most rows are whole blocks of four-bit numbers."""
SPARSE = ("deepseek_v32_sparse", "glm_moe_dsa_sparse", "deepseek_v4_sparse")
"""Models in which most documents are longer than what an indexer chooses."""
ROUNDED_TOLERANCE = 1e-2
"""Of losses in bf16."""
VARIANTS = (*MODELS, *(f"{family}_deep" for family in MODELS), "glm4_moe_lite_types", *SPARSE)


def _cell(stage: int, accumulation: int, *, packing: bool, family: str = FAMILY, **axes: Any) -> Cell:
    """Packed with clipping and activation checkpointing, padded without; both with weight decay."""
    family = f"{family}_deep" if {"pp", "ep"} <= axes.keys() else family
    if "pp" in axes:
        # Balanced stages are others with the layer, and a norm is then added up in another order.
        axes["pp_layers"] = "2 2" if family.endswith(("_deep", "_sparse")) else "1 1"
        if family.startswith("deepseek_v4"):
            axes["pp_layers"] = "2 3" if family.endswith("_deep") else "2 2"
    if "vpp" in axes:
        axes["pp_layers"] = "1 1 1 2" if family.startswith("deepseek_v4") else "1 1 1 1"
    clipped = {"max_grad_norm": 0.05 if packing else 0.0, "checkpointing": packing, "weight_decay": 0.1}
    return Cell(family, stage, accumulation, packing=packing, **clipped, **axes)


def _cells() -> list[Cell]:
    plain = [
        _cell(stage, accumulation, packing=packing, offload=offload)
        for stage, accumulation, packing in itertools.product(range(4), (1, 2), (True, False))
        for offload in ("none", "optimizer")
        if stage or offload == "none"
    ]
    shared = [
        _cell(stage, 2, packing=packing, family=family, **dict.fromkeys(row.axes, 2))
        for row, family in itertools.product(TESTED_LAYOUTS, MODELS)
        if family in row.families
        for stage, packing in itertools.product(row.stages, (True, False))
    ]
    sparse = [
        _cell(stage, 2, packing=packing, family=family, **dict.fromkeys(axes, 2))
        for axes in ((), ("tp",), ("ep",), ("sp",), ("pp",))
        for stage, family, packing in itertools.product((0, 1) if axes == ("pp",) else range(4), SPARSE, (True, False))
    ]
    others = [
        _cell(2, 2, packing=False, family="glm4_moe_lite_types"),
        *(_cell(stage, 2, packing=True, precision="bf16") for stage in range(1, 4)),
        *(_cell(stage, 2, packing=True, balances=True) for stage in range(4)),
    ]
    interleaved = [
        _cell(stage, accumulation, packing=packing, family="deepseek_v3_deep", pp=2, vpp=2, balances=balances)
        for stage, accumulation, packing, balances in (
            (0, 2, False, False),
            (1, 2, True, False),
            (1, 4, False, True),
        )
    ]
    interleaved.append(_cell(1, 2, packing=True, family="deepseek_v4_deep", pp=2, vpp=2))
    return [*plain, *others, *sparse, *shared, *interleaved]


ALL = [
    MtpLayout(cell, world, detach)
    for cell, world, detach in itertools.product(_cells(), (1, 2, 4), (True, False))
    if is_for(cell, world)
]
ALL += [
    MtpLayout(_cell(stage, 2, packing=packing, family=family), world, detach, adapters="lora")
    for stage, packing, family, world, detach in itertools.product(
        range(4), (True, False), (*MODELS, *SPARSE), (1, 2), (True, False)
    )
    if not family.startswith("deepseek_v4")
]
ALL += [
    MtpLayout(_cell(stage, 2, packing=True, **{axis: 2}), 2, detach, adapters="lora")
    for (stage, axis), detach in itertools.product(
        ((0, "tp"), (1, "tp"), (3, "tp"), (0, "pp"), (1, "pp"), (2, "sp"), (1, "ep"), (3, "ep")), (True, False)
    )
]
ALL += [
    MtpLayout(_cell(stage, 2, packing=packing, family=WIDE), world, detach, adapters="nf4")
    for stage, packing, world, detach in itertools.product(range(4), (True, False), (1, 2), (True, False))
]


CHOSEN = [
    MtpLayout(cell, world, *others)
    for cell, world, *others in (
        (_cell(0, 1, packing=True), 1, True, True),
        (_cell(1, 2, packing=False, offload="optimizer"), 2, False, False),
        (_cell(1, 2, packing=False, precision="bf16"), 2, True, True),
        (_cell(3, 2, packing=True, precision="bf16", offload="optimizer"), 1, True, True),
        (_cell(2, 2, packing=True, sp=2), 2, True, True),
        (_cell(1, 2, packing=True, family="deepseek_v32_sparse", tp=2), 2, True, False),
        (_cell(3, 2, packing=False, family="glm_moe_dsa_sparse", sp=2), 2, False, False),
        (_cell(1, 2, packing=False, family="glm4_moe_lite", tp=2), 2, True, False),
        (_cell(3, 2, packing=True, ep=2), 2, True, False),
        (_cell(0, 2, packing=False, family="glm4_moe", sp=2, ep=2), 2, False, False),
        (_cell(1, 2, packing=True, pp=2), 2, True, False),
        (_cell(1, 2, packing=False, pp=2), 2, False, False),
        (_cell(1, 2, packing=True, pp=2, balances=True), 2, True, True),
        (_cell(1, 2, packing=True, family="deepseek_v4", pp=2), 2, False, False),
        (_cell(3, 2, packing=True, family="deepseek_v4_sparse", sp=2), 2, True, True),
        (_cell(3, 2, packing=True), 2, True, True, "lora"),
        (_cell(2, 2, packing=False, family=WIDE), 1, True, False, "nf4"),
    )
]
"""Each axis, ZeRO stage and way to train; others are behind the marker."""


def _axes(layout: MtpLayout) -> tuple[Hashable, ...]:
    cell = layout.cell
    sizes = (cell.layout, cell.stage, cell.offload, cell.precision, cell.accumulation, layout.world)
    return (*sizes, cell.family, cell.packing, cell.balances, layout.detach, layout.adapters)


PAIRS = [layout for layout in pairwise(ALL, _axes) if layout not in CHOSEN]
"""Every two values of two axes that occur together."""
REST = [
    layout
    for layout in ALL
    if (layout.cell.family == FAMILY or layout.cell.vpp > 1) and layout not in (*CHOSEN, *PAIRS)
]


@pytest.fixture(scope="session")
def mtp_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp-models")
    for family in VARIANTS:
        write_mtp_model(family, folder / family)
    write_mtp_model(FAMILY, folder / WIDE, sizes=WIDE_SIZES)
    return folder


def _run(chosen: Sequence[MtpLayout], models: Path, out: Path) -> Path:
    return launch("mtp_worker.py", [(layout, layout.world) for layout in chosen], models, out)


@pytest.fixture(scope="session")
def results(mtp_models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return _run(asked_for(request, CHOSEN), mtp_models, tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="session")
def rest(mtp_models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return _run(asked_for(request, (*PAIRS, *REST)), mtp_models, tmp_path_factory.mktemp("mtp-rest"))


def _assert_equals_plain_loop(layout: MtpLayout, folder: Path, models: Path) -> None:
    found, cell = torch.load(folder / f"{layout.name}.pt", weights_only=True), layout.cell
    wanted = plain_steps(layout, models)
    is_rounded = cell.precision != "fp32"
    for metrics in (found["metrics"][0], found["eval"]):
        tolerance = ROUNDED_TOLERANCE if is_rounded else LOSS_TOLERANCE
        assert metrics["loss"] == pytest.approx(wanted.losses[0], abs=tolerance)
        assert metrics["mtp_loss"] == pytest.approx(wanted.mtp_losses[0], abs=tolerance)
        assert is_rounded or metrics["mtp_accuracy"] == pytest.approx(wanted.mtp_accuracies[0], abs=1e-9)
    if not is_rounded and not cell.balances:
        _assert_same_steps(found, wanted)
    if "without" in found and layout.world // (cell.tp * cell.pp) <= 2:
        # With more ranks, the place of an element in a buffer decides in which order a reduction adds it up.
        without, weights = found["without"], found["weights"]
        assert not [name for name in without if not torch.equal(without[name], weights[name])]
        assert len(without) < len(weights)


def _assert_same_steps(found: dict[str, Any], wanted: PlainSteps) -> None:
    assert found["norms"] == pytest.approx(wanted.norms, rel=GRADIENT_TOLERANCE)
    if wanted.mtp_norms[0]:
        own = [metrics["mtp_grad_norm"] for metrics in found["metrics"]]
        assert own == pytest.approx(wanted.mtp_norms, rel=GRADIENT_TOLERANCE)
    assert found["gradients"].keys() == wanted.gradients.keys()
    errors = {name: relative(found["gradients"][name], grad) for name, grad in wanted.gradients.items()}
    heads = {name: grad for name, grad in wanted.gradients.items() if ".mtp.hc_head." in name}
    for name, grad in heads.items():
        # A norm follows the head of streams, so most of its gradients cancels, and nearly all of its one scale's.
        errors[name] *= float(grad.norm() / max(each.norm() for each in heads.values()))
    limits = {name: GRADIENT_TOLERANCE * (5 if name in heads else 1) for name in errors}
    assert all(error < limits[name] for name, error in errors.items()), errors
    for name, steps in (("loss", wanted.losses), ("mtp_loss", wanted.mtp_losses)):
        assert [metrics[name] for metrics in found["metrics"]] == pytest.approx(steps, rel=1e-4), name


@pytest.mark.parametrize("layout", CHOSEN, ids=lambda layout: layout.name)
def test_layer_equals_plain_loop(layout: MtpLayout, results: Path, mtp_models: Path) -> None:
    if layout.cell.precision == "fp32" and not layout.cell.balances:
        nearest = plain_steps(layout, mtp_models).nearest
        assert nearest > NEAREST, f"{layout.cell.family}: take another seed, whose choices do not depend on rounding"
    _assert_equals_plain_loop(layout, results, mtp_models)


@pytest.mark.slow
@pytest.mark.parametrize("layout", PAIRS, ids=lambda layout: layout.name)
def test_layer_equals_plain_loop_in_pairs_of_settings(layout: MtpLayout, rest: Path, mtp_models: Path) -> None:
    _assert_equals_plain_loop(layout, rest, mtp_models)


@pytest.mark.slow
@pytest.mark.parametrize("layout", REST, ids=lambda layout: layout.name)
def test_layer_equals_plain_loop_in_other_layouts(layout: MtpLayout, rest: Path, mtp_models: Path) -> None:
    _assert_equals_plain_loop(layout, rest, mtp_models)
