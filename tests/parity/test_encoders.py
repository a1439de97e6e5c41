"""Law 1 for classification with encoders: loss, gradients and metrics equal those of a plain single-process loop over
unpadded texts, whatever the split.
"""

import itertools
from collections.abc import Hashable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification

from ds_finetune.families.table import family_of
from tests.model.encoders import ENCODERS, save_encoder
from tests.pairwise import pairwise
from tests.parity.encoder_worker import BETAS, LR, STEPS, EncoderCell, texts
from tests.parity.reference import ids_of, launch

Run = tuple[EncoderCell, int]
ALL: list[Run] = [
    (EncoderCell(*cell), world)
    for *cell, world in itertools.product(ENCODERS, (0, 1, 2, 3), (1, 3), (False, True), (False, True), (1, 2, 3))
]


def _axes(run: Run) -> tuple[Hashable, ...]:
    cell, world = run
    return *asdict(cell).values(), world


CHOSEN = pairwise(ALL, _axes)
"""Every pair of values of two axes; the full product is behind the marker."""
REST = [run for run in ALL if run not in CHOSEN]


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny classifier of each kind, with biases that are not zero."""
    folder = tmp_path_factory.mktemp("encoders")
    for name in ENCODERS:
        save_encoder(name, folder / name)
    return folder


@pytest.fixture(scope="session")
def results(encoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch("encoder_worker.py", CHOSEN, encoders, tmp_path_factory.mktemp("encoder-parity"))


@pytest.fixture(scope="session")
def rest(encoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch("encoder_worker.py", REST, encoders, tmp_path_factory.mktemp("encoder-parity-rest"))


@cache
def _plain_loop(folder: Path) -> dict[str, Any]:
    """Steps of a plain loop, one unpadded text per forward, with transformers' own class, attention and loss."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        losses = [_loss(model, text) for text in texts()]
        loss = torch.stack([each for each, _ in losses]).mean()
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        if step == 0:
            found["gradients"] = {name: param.grad.clone() for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        scored = [_loss(model, text) for text in texts()]
    right = [int(scores.argmax() == text.target) for (_, scores), text in zip(scored, texts(), strict=True)]
    found["loss"] = float(sum(loss for loss, _ in scored)) / len(scored)
    return found | {"accuracy": sum(right) / len(right)}


def _loss(model: Any, text: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.from_numpy(text.ids).long()[None]
    has_types = family_of(model.config.model_type).encoder.has_token_types
    types = (torch.arange(len(text.ids)) >= text.second).long()[None]
    extra = {"token_type_ids": types} if has_types else {}
    scores = model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).logits
    return functional.cross_entropy(scores, torch.tensor([text.target])), scores[0]


def _check(cell: EncoderCell, world: int, out: Path, encoders: Path) -> None:
    result = torch.load(out / f"{cell.name}-world={world}.pt", weights_only=True)
    wanted = _plain_loop(encoders / cell.model)
    assert result["losses"][0] == pytest.approx(wanted["losses"][0], abs=1e-6)
    assert result["norms"][0] == pytest.approx(wanted["norms"][0], rel=1e-4)
    assert result["gradients"].keys() == wanted["gradients"].keys()
    wrong = {
        name: float((result["gradients"][name] - gradient).norm())
        for name, gradient in wanted["gradients"].items()
        # Biases of keys have no gradient but rounding: they add the same to all logits of a query.
        if (result["gradients"][name] - gradient).norm() > 1e-4 * gradient.norm() + 1e-6
    }
    assert not wrong
    assert result["losses"][1:] == pytest.approx(wanted["losses"][1:], rel=1e-4)
    assert result["metrics"]["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert result["metrics"]["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-9)


@pytest.mark.parametrize(("cell", "world"), CHOSEN, ids=ids_of(CHOSEN))
def test_cell_equals_plain_loop(cell: EncoderCell, world: int, results: Path, encoders: Path) -> None:
    _check(cell, world, results, encoders)


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "world"), REST, ids=ids_of(REST))
def test_other_cell_equals_plain_loop(cell: EncoderCell, world: int, rest: Path, encoders: Path) -> None:
    _check(cell, world, rest, encoders)
