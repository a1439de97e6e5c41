"""The reference loop's own formulas: equal to the objectives, and unequal where an objective is broken."""

import ast
from typing import Any

import pytest
import torch

from ds_finetune.config.objectives import GrpoObjective, read_objective
from ds_finetune.objectives.objective import (
    AnswerObjective,
    AnswerTokens,
    DocumentLogProbs,
    DocumentObjective,
    ScoreObjective,
    make_objective,
)
from ds_finetune.reference.selftest.plain_losses import (
    Answer,
    SampledTokens,
    answers_loss,
    sampled_loss,
    samples_per_unit,
    score_loss,
)
from tests.conftest import ROOT
from tests.reference.selftest.faults import FAULTY, plant

SECTIONS: list[dict[str, Any]] = [
    *({"name": "dpo", "loss": loss, "nll_weight": 0.3} for loss in ("hinge", "ipo", "apo_zero", "apo_down")),
    *({"name": "dpo", "loss": loss, "label_smoothing": 0.1} for loss in ("sigmoid", "robust", "sigmoid_norm")),
    *({"name": "cpo", "loss": loss} for loss in ("sigmoid", "hinge", "ipo")),
    {"name": "simpo"},
    {"name": "orpo"},
    {"name": "kto", "beta": 0.2, "desirable_weight": 1.3},
    {"name": "reward", "center_weight": 0.1},
    {"name": "classification", "num_labels": 3, "label_smoothing": 0.1},
    {"name": "classification", "num_labels": 1},
    {"name": "grpo", "kl_weight": 0.2, "dual_clip": 1.1, "mismatch": "token", "mismatch_cap": 1.2},
    {"name": "grpo", "ratio": "sequence", "aggregation": "sequence", "clip_low": 0.05, "mismatch": "geometric"},
    {"name": "grpo", "ratio": "capped", "ratio_cap": 1.2, "aggregation": "fixed", "fixed_length": 9},
]
PAIRS, Z0 = 4, 0.7
TOKENS = torch.tensor([3.0, 5.0, 1.0, 2.0, 7.0, 4.0, 6.0, 6.0], dtype=torch.float64)
TARGETS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)


def _inputs(tree: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores or log-probabilities of eight answers or of their tokens, which have a gradient, and log-probabilities of
    the reference; those of tokens by the old weights, the sampler and the reference.
    """
    torch.manual_seed(3)
    if read_objective(tree).row.head == "answers":
        logps = -1 - torch.rand(int(TOKENS.sum()), dtype=torch.float64)
        return logps, logps + 0.3 * torch.randn(3, len(logps), dtype=torch.float64)
    if read_objective(tree).row.head == "scores":
        return torch.randn(2 * PAIRS, tree.get("num_labels", 1 + (tree["name"] == "classification"))), torch.zeros(0)
    logps = -TOKENS * (1 + torch.rand(2 * PAIRS, dtype=torch.float64))
    return logps, logps + torch.randn(2 * PAIRS, dtype=torch.float64)


def _program(tree: dict[str, Any], inputs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    objective = make_objective(read_objective(tree))
    if isinstance(objective, AnswerObjective):
        return _program_of_tokens(objective, inputs, reference)
    tokens = {"chosen_tokens": float(TOKENS[::2].sum()), "pairs": PAIRS, "examples": 2 * PAIRS}
    weights = torch.tensor([term.weight / tokens[term.unit] for term in objective.terms], dtype=torch.float64)
    if isinstance(objective, ScoreObjective):
        return objective.loss(inputs, TARGETS, weights).loss
    assert isinstance(objective, DocumentObjective)
    documents = DocumentLogProbs(logp=inputs, num_tokens=TOKENS, target=TARGETS, reference=reference)
    return objective.loss(documents, weights, torch.tensor(Z0, dtype=torch.float64)).loss


def _program_of_tokens(objective: AnswerObjective, logps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    index = torch.arange(2 * PAIRS).repeat_interleave(TOKENS.long())
    old, sampled, reference = others
    tokens = AnswerTokens(
        logp=logps,
        entropy=torch.zeros_like(old),
        advantage=2 * TARGETS[index] - 1,
        lengths=TOKENS[index],
        old=old,
        reference=reference,
        sampled=sampled,
        means=lambda values: (torch.zeros_like(TOKENS).index_add(0, index, values) / TOKENS)[index],
    )
    counts = {"supervised_tokens": float(TOKENS.sum()), "examples": 2 * PAIRS}
    (term,) = objective.terms
    return objective.loss(tokens, torch.tensor([term.weight / counts[term.unit]], dtype=torch.float64)).loss


def _plain_of_tokens(section: GrpoObjective, logps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    parts = torch.cat([logps[None], others]).split(TOKENS.int().tolist(), dim=1)
    counts = {"supervised_tokens": int(TOKENS.sum()), "units": 2 * PAIRS}
    answers = [SampledTokens(*part, 2 * target - 1) for part, target in zip(parts, TARGETS.tolist(), strict=True)]
    return torch.stack([sampled_loss(section, answer, counts) for answer in answers]).sum()


def _plain(tree: dict[str, Any], inputs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    section = read_objective(tree)
    if isinstance(section, GrpoObjective):
        return _plain_of_tokens(section, inputs, reference)
    size = samples_per_unit(section)
    units = [slice(first, first + size) for first in range(0, 2 * PAIRS, size)]
    if section.row.head == "scores":
        return torch.stack([score_loss(section, inputs[unit], TARGETS[unit].tolist()) for unit in units]).mean()
    numbers = zip(inputs, TOKENS.int().tolist(), reference.tolist(), TARGETS.tolist(), strict=True)
    answers = [Answer(*each) for each in numbers]
    mean = torch.stack([answers_loss(section, answers[unit], Z0) for unit in units]).mean()
    return mean - section.chosen_weight * inputs[::2].sum() / TOKENS[::2].sum()


def _difference(tree: dict[str, Any]) -> float:
    """The largest difference of losses and of gradients."""
    inputs, reference = _inputs(tree)
    found = []
    for way in (_program, _plain):
        leaf = inputs.clone().requires_grad_()
        loss = way(tree, leaf, reference)
        found.append(torch.cat([loss.detach().double().view(1), torch.autograd.grad(loss, leaf)[0].double().flatten()]))
    return float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize("tree", SECTIONS, ids=lambda tree: "-".join(map(str, tree.values())))
def test_formulas_of_the_reference_loop_equal_the_objectives(tree: dict[str, Any]) -> None:
    assert _difference(tree) < 1e-7


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_in_an_objective_is_a_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _difference(FAULTY[name]) < 1e-7
    plant(name, monkeypatch.setattr)
    assert _difference(FAULTY[name]) > 1e-3


@pytest.mark.parametrize("module", ["plain_losses", "plain_features", "reference_loop"])
def test_the_reference_loop_imports_no_objective(module: str) -> None:
    tree = ast.parse((ROOT / "ds_finetune" / "reference" / "selftest" / f"{module}.py").read_text())
    imported = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported.discard("ds_finetune.objectives.labels")
    assert not [name for name in imported if name.startswith("ds_finetune.objectives")]
