"""Every objective takes the step of a plain loop over unpadded documents, in every layout.

The loop runs the model of plain transformers on one document at a time and takes log_softmax of its logits. Each loss
is written out here once more, for one pair.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import logsigmoid, sigmoid
from transformers import AutoModelForCausalLM

from ds_finetune.model.weights.names import weight_of
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.reference.selftest.cells import Cell
from tests.pairwise import pairwise
from tests.parity.four_bit import HAS_FOUR_BIT, TWIN, WIDE, write_wide
from tests.parity.objective_cells import (
    OBJECTIVES,
    Document,
    Layout,
    documents,
    interleaved_layouts,
    layouts,
    mismatched_documents,
)
from tests.parity.reference import GRADIENT_TOLERANCE, asked_for, launch, relative

LORA_SCALE = 2.0
ALL_DOCUMENTS = (*documents(), *mismatched_documents())


class Answer(NamedTuple):
    """Log-probability of an answer, its tokens, and the log-probability of the reference."""

    logp: torch.Tensor
    tokens: int
    reference: torch.Tensor


class Losses(NamedTuple):
    """The loss of one pair, and the weight of the cross entropy of the chosen answers beside it."""

    of_pair: Callable[[Answer, Answer], torch.Tensor]
    nll_weight: float = 0.0


def _dpo(w: Answer, r: Answer) -> torch.Tensor:
    return -logsigmoid(0.1 * ((w.logp - w.reference) - (r.logp - r.reference)))


def _ipo(w: Answer, r: Answer) -> torch.Tensor:
    return ((w.logp - w.reference) / w.tokens - (r.logp - r.reference) / r.tokens - 1 / 0.2) ** 2


def _simpo(w: Answer, r: Answer) -> torch.Tensor:
    return -logsigmoid(2.0 * (w.logp / w.tokens - r.logp / r.tokens) - 0.5)


def _cpo(w: Answer, r: Answer) -> torch.Tensor:
    return -logsigmoid(0.1 * (w.logp - r.logp))


def _orpo(w: Answer, r: Answer) -> torch.Tensor:
    odds = [(a.logp / a.tokens) - torch.log(1 - torch.exp(a.logp / a.tokens)) for a in (w, r)]
    return -0.1 * logsigmoid(odds[0] - odds[1])


LOSSES: Sequence[Losses] = (Losses(_dpo, 0.3), Losses(_ipo), Losses(_simpo), Losses(_cpo, 1.0), Losses(_orpo, 1.0))
"""In the order of OBJECTIVES, of which the last is KTO."""


def _kto(answers: Sequence[Answer], z0: float) -> torch.Tensor:
    """Of good and bad answers; z0 is a mean over prompts with other answers."""
    losses = []
    for answer, document in zip(answers, documents(), strict=True):
        ratio = answer.logp - answer.reference
        is_good = document.target == 1
        losses.append(1.3 * (1 - sigmoid(0.2 * (ratio - z0))) if is_good else 1 - sigmoid(0.2 * (z0 - ratio)))
    return torch.stack(losses).mean()


class Plain(NamedTuple):
    """Loss, gradients and z0 (KTO) of the plain loop."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    z0: float = 0.0


def _logp(model: Any, weights: Mapping[str, torch.Tensor], document: Document) -> torch.Tensor:
    """Log-probability of the answer of a document under the model with these weights, fp64."""
    ids, labels = torch.from_numpy(document.ids).long()[None], torch.from_numpy(document.labels).long()
    logits = functional_call(model, dict(weights), kwargs={"input_ids": ids, "use_cache": False}).logits[0]
    here = labels != IGNORE_INDEX
    return logits.log_softmax(-1)[here].gather(1, labels[here, None]).double().sum()


def _answers(logps: Sequence[torch.Tensor], references: Sequence[float]) -> list[Answer]:
    return [
        Answer(logp, len(document.ids) - document.prompt, torch.tensor(reference, dtype=torch.float64))
        for logp, document, reference in zip(logps, documents(), references, strict=False)
    ]


def _loss(losses: Losses, pairs: Sequence[tuple[Answer, Answer]]) -> torch.Tensor:
    total = torch.stack([losses.of_pair(w, r) for w, r in pairs]).mean()
    nll = -torch.stack([w.logp for w, _ in pairs]).sum() / sum(w.tokens for w, _ in pairs)
    return total + losses.nll_weight * nll


def _plain_loop(
    model: Any, trained: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], references: Sequence[float]
) -> list[Plain]:
    """Each objective's loss with its gradients of `trained`, of which `weights` are computed.

    `references` are those of all documents, and then of the mismatched ones.
    """
    logps = [_logp(model, weights, document) for document in documents()]
    with torch.no_grad():
        mismatched = [_logp(model, weights, document).item() for document in mismatched_documents()]
    answers = _answers(logps, references)
    ratios = [logp - reference for logp, reference in zip(mismatched, references[len(answers) :], strict=True)]
    z0 = max(0.0, sum(ratios) / len(ratios))
    pairs = list(zip(answers[::2], answers[1::2], strict=True))
    found = []
    for loss in (*(_loss(losses, pairs) for losses in LOSSES), _kto(answers, z0)):
        gradients = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
        named = {name: grad for name, grad in zip(trained, gradients, strict=True) if grad is not None}
        found.append(Plain(loss.item(), named, z0))
    return found


@cache
def _plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@cache
def _full(folder: Path) -> list[Plain]:
    model = _plain_model(folder)
    trained = dict(model.named_parameters())
    return _plain_loop(model, trained, trained, [document.reference for document in ALL_DOCUMENTS])


def _with_adapters(folder: Path, adapters: Mapping[str, torch.Tensor]) -> list[Plain]:
    """With adapters merged into the weights; the reference is the model without them."""
    model = _plain_model(folder)
    trained = {name: tensor.clone().requires_grad_() for name, tensor in adapters.items()}
    base = dict(model.named_parameters())
    by_weight: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in trained.items():
        weight, side = weight_of(name)
        by_weight.setdefault(weight, {})[side] = tensor
    merged = {name: base[name] + LORA_SCALE * sides["B"] @ sides["A"] for name, sides in by_weight.items()}
    with torch.no_grad():
        references = [_logp(model, base, document).item() for document in ALL_DOCUMENTS]
    return _plain_loop(model, trained, base | merged, references)


def _assert_equals_plain_loop(layout: Layout, folder: Path, models: Path) -> None:
    result = torch.load(folder / f"{layout.name}.pt", weights_only=True)
    model = models / (TWIN if layout.quantize else layout.cell.family)
    wanted = _with_adapters(model, result["adapters"]) if layout.has_lora else _full(model)
    for number, found in zip(layout.objectives, result["objectives"], strict=True):
        tree, plain = OBJECTIVES[number], wanted[number]
        assert found["loss"] == pytest.approx(plain.loss, rel=2e-6), tree
        assert found["eval"] == pytest.approx(plain.loss, rel=2e-6), tree
        assert found["metrics"].get("kl", plain.z0) == pytest.approx(plain.z0, rel=2e-6, abs=1e-6), tree
        norm = torch.nn.utils.get_total_norm(list(plain.gradients.values()))
        assert found["norm"] == pytest.approx(float(norm), rel=GRADIENT_TOLERANCE), tree
        assert found["gradients"].keys() == plain.gradients.keys(), tree
        errors = {name: relative(found["gradients"][name], grad) for name, grad in plain.gradients.items()}
        assert max(errors.values()) < GRADIENT_TOLERANCE, (tree, errors)
    assert result["numbers"] == list(range(len(documents())))
    if not layout.has_lora:
        plain_model = _plain_model(model)
        with torch.no_grad():
            logps = [_logp(plain_model, {}, document).item() for document in documents()]
        assert result["logps"] == pytest.approx(logps, abs=2e-5)


def _axes(layout: Layout) -> tuple[Hashable, ...]:
    cell = layout.cell
    return cell.family, cell.layout, cell.stage, cell.packing, cell.accumulation, layout.has_lora, layout.world


ALL = layouts(worlds=(1, 2, 3, 4))
PAIRS = pairwise([layout for layout in ALL if layout.world < 4], _axes)
"""Every pair of values of two axes; the full product is behind the marker."""
CHOSEN = [replace(layout, objectives=(0, 1 + number % 4, 5)) for number, layout in enumerate(PAIRS)]
"""DPO and KTO, which have sums of their own, and the other losses of pairs by turns."""
FOUR_BIT = [
    Layout(Cell(WIDE, stage, accumulation, packing), world, has_lora=True, quantize="nf4")
    for stage, accumulation, packing, world in product(range(4), (1, 2), (True, False), (1, 2, 3))
    if HAS_FOUR_BIT
]
CHOSEN += [
    replace(layout, objectives=(0, 5))
    for layout in FOUR_BIT
    if (layout.cell.stage, layout.cell.accumulation, layout.cell.packing, layout.world) == (2, 2, True, 2)
]
REST = [layout for layout in [*ALL, *interleaved_layouts()] if layout not in PAIRS]
REST += [replace(layout, objectives=tuple({*range(6)} - {*layout.objectives})) for layout in CHOSEN]
REST += pairwise([layout for layout in FOUR_BIT if layout.name not in {one.name for one in CHOSEN}], _axes)


def _run(chosen: Sequence[Layout], models: Path, out: Path) -> Path:
    return launch("objective_worker.py", [(layout, layout.world) for layout in chosen], models, out)


@pytest.fixture(scope="session")
def with_wide(models: Path) -> Path:
    """The tiny models, and one for weights in four bits among them."""
    write_wide(models)
    return models


@pytest.fixture(scope="session")
def results(with_wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(CHOSEN, with_wide, tmp_path_factory.mktemp("objectives"))


@pytest.fixture(scope="session")
def rest(request: pytest.FixtureRequest, with_wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(asked_for(request, REST), with_wide, tmp_path_factory.mktemp("objectives-rest"))


@pytest.mark.parametrize("layout", CHOSEN, ids=lambda layout: layout.name)
def test_objectives_equal_plain_loop(layout: Layout, results: Path, with_wide: Path) -> None:
    _assert_equals_plain_loop(layout, results, with_wide)


@pytest.mark.slow
@pytest.mark.parametrize("layout", REST, ids=lambda layout: layout.name)
def test_objectives_equal_plain_loop_in_other_layouts(layout: Layout, rest: Path, with_wide: Path) -> None:
    _assert_equals_plain_loop(layout, rest, with_wide)
