"""Routers are balanced, and their choices counted, as in a plain loop over unpadded documents, in every layout."""

from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ds_finetune.config.objectives import read_objective
from ds_finetune.model.build.meta_model import described
from ds_finetune.plan.trained_parts import RouterPlan, plan_routers
from ds_finetune.reference.selftest.cells import samples
from ds_finetune.reference.selftest.reference_loop import Steps, reference_loop
from tests.pairwise import each_value, pairwise
from tests.parity.reference import GRADIENT_TOLERANCE, asked_for, launch, relative
from tests.parity.router_cells import STEPS, RouterLayout, config_of, layouts, write_models

TOKENS = sum(len(ids) for ids, _ in samples())
ROUNDED = {"fp32": 2e-6, "bf16": 2e-2}
"""Largest relative difference of a mean over documents by precision."""


def _axes(layout: RouterLayout) -> tuple[Hashable, ...]:
    cell = layout.cell
    rows = (cell.packing, cell.checkpointing, cell.accumulation)
    return cell.family.removesuffix("_deep"), cell.layout, cell.stage, *rows, cell.precision, cell.objective


ALL = layouts(worlds=(1, 2, 4))
CHOSEN = each_value([layout for layout in ALL if layout.world == 2 and layout.cell.vpp == 1], _axes)
"""Every value of every axis on two ranks; others are behind the marker."""
PAIRS = pairwise([layout for layout in ALL if layout not in CHOSEN], lambda layout: (*_axes(layout), layout.world))
"""Every two values of two axes that occur together."""
REST = [layout for layout in ALL if layout not in CHOSEN and layout not in PAIRS]


def _run(chosen: Sequence[RouterLayout], models: Path, out: Path) -> Path:
    return launch("router_worker.py", [(layout, layout.world) for layout in chosen], models, out)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("router-models"))


@pytest.fixture(scope="session")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return _run(asked_for(request, CHOSEN), models, tmp_path_factory.mktemp("routers"))


@pytest.fixture(scope="session")
def rest(models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return _run(asked_for(request, (*PAIRS, *REST)), models, tmp_path_factory.mktemp("routers-rest"))


def _router(layout: RouterLayout, models: Path) -> RouterPlan:
    folder = models / layout.cell.family
    found = plan_routers(config_of(layout, folder, folder).router, described(AutoConfig.from_pretrained(folder)))
    assert found is not None
    return found


@cache
def _plain(folder: Path, router: RouterPlan, objective: str) -> Steps:
    """The same steps of the plain loop, with a learning rate of 0."""
    return reference_loop(
        folder,
        steps=STEPS,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        objective=read_objective(objective),
        router=router,
    )


def _assert_equals_plain_loop(layout: RouterLayout, folder: Path, models: Path) -> None:
    result, cell = torch.load(folder / f"{layout.name}.pt", weights_only=True), layout.cell
    router = _router(layout, models)
    plain = _plain(models / cell.family, router, cell.objective)
    close = {"rel": ROUNDED[cell.precision]}
    assert result["eval"]["balance_loss"] == pytest.approx(plain.balances[0], **close)
    for number, step in enumerate(result["steps"]):
        assert not step["skipped"]
        assert step["tokens"] == TOKENS
        assert step["metrics"]["loss"] == pytest.approx(plain.losses[number], rel=max(close["rel"], 2e-6))
        assert step["metrics"]["balance_loss"] == pytest.approx(plain.balances[number], **close)
        if router.kind.bias is not None:
            of_biases = step["counts"][[layer in router.balanced for layer in router.layers]]
            _assert_biases_moved(*result["biases"][number : number + 2], of_biases, router.section.bias_update)
        if cell.precision == "fp32":
            assert torch.equal(step["counts"], plain.choices[number])
            assert step["norm"] == pytest.approx(plain.norms[number], rel=GRADIENT_TOLERANCE)
    if cell.precision == "fp32":
        _assert_gradients(result["steps"][0]["gradients"], plain.gradients)


def _assert_gradients(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert found.keys() == plain.keys()
    errors = {name: relative(found[name], grad) for name, grad in plain.items()}
    assert max(errors.values()) < GRADIENT_TOLERANCE, errors


def _assert_biases_moved(before: dict[str, Any], after: dict[str, Any], counts: torch.Tensor, rate: float) -> None:
    # Pipeline ranks with several chunks of layers give them in another order.
    names = sorted(before, key=lambda name: int(name.split(".")[2]))
    for name, of_layer in zip(names, counts.double(), strict=True):
        moved = before[name] - torch.tensor(rate) * torch.sign(of_layer - of_layer.mean()).float()
        assert torch.equal(after[name], moved), name
        assert not torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("layout", CHOSEN, ids=lambda layout: layout.name)
def test_routers_equal_plain_loop(layout: RouterLayout, results: Path, models: Path) -> None:
    _assert_equals_plain_loop(layout, results, models)


@pytest.mark.slow
@pytest.mark.parametrize("layout", PAIRS, ids=lambda layout: layout.name)
def test_routers_equal_plain_loop_in_pairs_of_settings(layout: RouterLayout, rest: Path, models: Path) -> None:
    _assert_equals_plain_loop(layout, rest, models)


@pytest.mark.slow
@pytest.mark.parametrize("layout", REST, ids=lambda layout: layout.name)
def test_routers_equal_plain_loop_in_other_layouts(layout: RouterLayout, rest: Path, models: Path) -> None:
    _assert_equals_plain_loop(layout, rest, models)
