"""Indexers are trained as in a plain loop over unpadded documents, in every layout, and all other weights as without
their loss.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finetune.plan.mesh import TESTED_LAYOUTS
from ds_finetune.reference.selftest.cells import Cell
from tests.pairwise import in_threes
from tests.parity.choices import NearestChoice
from tests.parity.indexer_cells import IndexerLayout, plain_steps, write_indexed_model
from tests.parity.reference import GRADIENT_TOLERANCE, LOSS_TOLERANCE, asked_for, is_for, launch, relative

SPARSE = ("deepseek_v32_sparse", "glm_moe_dsa_sparse")
ENTRIES = ("deepseek_v4_sparse", "deepseek_v4")
"""DeepSeek-V4, whose indexers choose entries."""
MODELS = (*SPARSE, "deepseek_v32", "glm_moe_dsa", *ENTRIES)
SHORT = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4")
"""In these no document is longer than what is attended to in full."""
ROUNDED_TOLERANCE = 2e-2
"""Of losses in bf16."""
STEP_TOLERANCE = 1e-5
"""Of losses in fp32, relative. Norms of gradients differ by no more than gradients: by GRADIENT_TOLERANCE."""


def _cell(stage: int, accumulation: int, *, packing: bool, family: str = SPARSE[0], **others: Any) -> Cell:
    """Packed with activation checkpointing, padded without; both with clipping and weight decay."""
    if "pp" in others:
        # The first layer of DeepSeek-V4 has no indexer.
        others["pp_layers"] = "1 3" if family in ENTRIES else "2 2"
    clipped = {"max_grad_norm": 0.5, "checkpointing": packing, "weight_decay": 0.1}
    return Cell(family, stage, accumulation, packing=packing, **clipped, **others)


def _layouts() -> list[IndexerLayout]:
    plain = [
        (_cell(stage, accumulation, packing=packing, family=family, offload=offload), how)
        for stage, accumulation, packing, family in itertools.product(range(4), (1, 2), (True, False), MODELS)
        for offload in ("none", "optimizer")
        for how in ("sparse", "dense_warmup")
        if stage or offload == "none"
    ]
    shared = [
        (_cell(stage, 2, packing=packing, family=family, **dict.fromkeys(row.axes, 2)), how)
        for row, family in itertools.product(TESTED_LAYOUTS, (*SPARSE, ENTRIES[0]))
        for stage, packing in itertools.product(row.stages, (True, False))
        for how in ("sparse", "dense_warmup")
        if how == "sparse" or not row.axes & {"pp", "ep"}
    ]
    rounded = [(_cell(stage, 2, packing=True, precision="bf16"), "sparse") for stage in range(1, 4)]
    return [
        IndexerLayout(cell, world, how, how == "sparse" and cell.family in SHORT and world <= 2)
        for cell, how in [*plain, *shared, *rounded]
        for world in (1, 2, 4)
        if is_for(cell, world)
    ]


ALL = _layouts()
CHOSEN = [
    IndexerLayout(cell, 2, how, cell.family in SHORT)
    for cell, how in (
        (_cell(0, 1, packing=True, family=MODELS[2]), "sparse"),
        (_cell(3, 2, packing=True, family=SPARSE[1]), "sparse"),
        (_cell(1, 2, packing=False, family=SPARSE[1], tp=2), "sparse"),
        (_cell(2, 2, packing=True, family=SPARSE[1], sp=2), "sparse"),
        (_cell(1, 2, packing=False), "dense_warmup"),
        (_cell(3, 2, packing=True, family=ENTRIES[0], sp=2), "sparse"),
        (_cell(1, 2, packing=True, family=ENTRIES[0], pp=2), "sparse"),
    )
]
"""Each ZeRO stage and way to train, and the axes whose ranks share an indexer's loss; others are behind the marker."""


def _axes(layout: IndexerLayout) -> tuple[Hashable, ...]:
    cell = layout.cell
    sizes = (cell.layout, cell.stage, cell.offload, cell.precision, cell.accumulation, layout.world)
    return (*sizes, cell.family, cell.packing, layout.stage, layout.is_compared)


REST = [layout for layout in in_threes(ALL, _axes) if layout not in CHOSEN]
"""Every three values of three axes that occur together."""


@pytest.fixture(scope="session")
def indexed_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexed-models")
    for family in MODELS:
        write_indexed_model(family, folder / family)
    return folder


def _run(chosen: Sequence[IndexerLayout], models: Path, out: Path) -> Path:
    return launch("indexer_worker.py", [(layout, layout.world) for layout in chosen], models, out)


@pytest.fixture(scope="session")
def results(indexed_models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return _run(asked_for(request, CHOSEN), indexed_models, tmp_path_factory.mktemp("indexers"))


@pytest.fixture(scope="session")
def rest(indexed_models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return _run(asked_for(request, REST), indexed_models, tmp_path_factory.mktemp("indexers-rest"))


def _assert_equals_plain_loop(layout: IndexerLayout, folder: Path, models: Path) -> None:
    found, cell = torch.load(folder / f"{layout.name}.pt", weights_only=True), layout.cell
    wanted = plain_steps(
        models / cell.family,
        stage=layout.stage,
        max_grad_norm=cell.max_grad_norm,
        weight_decay=cell.weight_decay,
    )
    if layout.is_compared:
        others = found["frozen_gradients"]
        assert all(torch.equal(found["gradients"][name], grad) for name, grad in others.items())
        # Those of DeepSeek-V4 have odd sizes: with indexers between them, an element has another place in a buffer,
        # which decides how the optimizer rounds it.
        if cell.family not in ENTRIES:
            _assert_others_are_the_same(found["weights"], found["frozen"])
    is_rounded = cell.precision != "fp32"
    tolerance = ROUNDED_TOLERANCE if is_rounded else LOSS_TOLERANCE
    for metrics in (found["metrics"][0], found["eval"]):
        assert metrics["loss"] == pytest.approx(wanted.losses[0], abs=tolerance)
        assert metrics["indexer_loss"] == pytest.approx(wanted.indexer_losses[0], abs=tolerance)
    if is_rounded:
        return
    assert found["gradients"].keys() == wanted.gradients.keys()
    errors = {name: relative(found["gradients"][name], grad) for name, grad in wanted.gradients.items()}
    assert max(errors.values()) < GRADIENT_TOLERANCE, errors
    assert found["norms"] == pytest.approx(wanted.norms, rel=GRADIENT_TOLERANCE)
    if layout.stage == "sparse":
        own = [metrics["indexer_grad_norm"] for metrics in found["metrics"]]
        assert own == pytest.approx(wanted.indexer_norms, rel=GRADIENT_TOLERANCE)
    for name, steps in (("loss", wanted.losses), ("indexer_loss", wanted.indexer_losses)):
        assert [metrics[name] for metrics in found["metrics"]] == pytest.approx(steps, rel=STEP_TOLERANCE), name


def _assert_others_are_the_same(weights: dict[str, torch.Tensor], frozen: dict[str, torch.Tensor]) -> None:
    """Bit for bit, because no document is long enough for a choice."""
    assert weights.keys() == frozen.keys()
    changed = {name for name in weights if not torch.equal(weights[name], frozen[name])}
    assert changed == {name for name in weights if ".indexer." in name}


@pytest.mark.parametrize(
    ("scores", "distance"),
    [
        ([[4.0, 3.0, 2.0], [1.0, 8.0, -6.0]], 0.25),
        ([[4.0, 3.0, -math.inf], [1.0, 4.0, 1.0]], 0.0),
        ([[4.0, 3.0, -math.inf], [4.0, 3.0, torch.finfo(torch.float32).min]], math.inf),
        ([[4.0, 4.0], [4.0, 4.0]], math.inf),
    ],
    ids=["least row", "equal", "others are masked", "all are chosen"],
)
def test_nearest_choice(scores: list[list[float]], distance: float) -> None:
    with NearestChoice() as choices:
        torch.tensor(scores).topk(2)
    assert choices.distance == distance


@pytest.mark.parametrize("layout", CHOSEN, ids=lambda layout: layout.name)
def test_indexers_equal_plain_loop(layout: IndexerLayout, results: Path, indexed_models: Path) -> None:
    _assert_equals_plain_loop(layout, results, indexed_models)


@pytest.mark.slow
@pytest.mark.parametrize("layout", REST, ids=lambda layout: layout.name)
def test_indexers_equal_plain_loop_in_other_layouts(layout: IndexerLayout, rest: Path, indexed_models: Path) -> None:
    _assert_equals_plain_loop(layout, rest, indexed_models)
