"""The loss of sampled answers in the head equals autograd over whole logits in fp64, with ids that are never drawn."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ds_finetune.config.objectives import GrpoObjective
from ds_finetune.model.loss.token_loss import LossHead
from ds_finetune.objectives.grpo import PolicyGradient
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import AnswerNumbers, AnswerTokens, Examples, LossAndSums, StepNumbers

WIDTH, VOCABULARY, TOKENS = 16, 50, 24
LENGTHS = (5, 9, 1, 12)
"""Tokens of the answers in two rows of two documents, each after a prompt of 3 tokens and before 1 of padding."""
SECTIONS: tuple[dict[str, Any], ...] = (
    {"kl_weight": 0.1, "mismatch": "token"},
    {"aggregation": "sequence", "ratio": "sequence", "clip_low": 0.1, "clip_high": 0.1},
    {"aggregation": "fixed", "fixed_length": 10, "ratio": "capped", "ratio_cap": 1.2},
)


def rows() -> tuple[torch.Tensor, Examples]:
    """Labels and documents of two rows."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.full((2, TOKENS), IGNORE_INDEX)
    index = torch.full((2, TOKENS), -1)
    for document, length in enumerate(LENGTHS):
        row, start = document // 2, 0 if document % 2 == 0 else 4 + LENGTHS[document - 1]
        index[row, start : start + 3 + length] = document
        labels[row, start + 2 : start + 2 + length] = torch.randint(0, VOCABULARY - 5, (length,), generator=generator)
    every = torch.arange(len(LENGTHS))
    numbers = [torch.rand(2, TOKENS, generator=generator) * -2 - 3 for _ in range(3)]
    numbers[0][0, :9] = torch.nan
    advantages = torch.tensor([0.5, -1.0, 2.0, -0.3], dtype=torch.float64)
    return labels, Examples(index, every, every, every, advantages, every.double(), answers=AnswerNumbers(*numbers))


def plain(
    objective: PolicyGradient, hidden: torch.Tensor, weight: torch.Tensor, forbidden: torch.Tensor
) -> LossAndSums:
    """From whole logits."""
    labels, examples = rows()
    here = labels != IGNORE_INDEX
    logits = (hidden[here] @ weight.T).masked_fill(forbidden, -torch.inf)
    every, index = logits.log_softmax(-1), examples.index[here]
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    assert examples.answers is not None
    tokens = AnswerTokens(
        logp=every.gather(1, labels[here][:, None])[:, 0],
        entropy=torch.special.entr(every.exp()).sum(-1).detach(),
        advantage=examples.targets[index],
        lengths=lengths[index],
        old=examples.answers.old[here].double(),
        reference=examples.answers.reference[here].double(),
        sampled=examples.answers.sampled[here].double(),
        means=lambda values: (torch.zeros_like(lengths).index_add(0, index, values) / lengths)[index],
    )
    return objective.loss(tokens, torch.tensor([0.01], dtype=torch.float64))


def head_of(weight: torch.Tensor, objective: PolicyGradient, forbidden: torch.Tensor | None) -> LossHead:
    head = LossHead(WIDTH, VOCABULARY, bias=False)
    head.weight = nn.Parameter(weight)
    head.objective, head.forbidden = objective, forbidden
    return head


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("keys", SECTIONS, ids=lambda keys: str(keys.get("ratio", "token")))
def test_loss_and_gradients_equal_autograd(keys: dict[str, Any], is_frozen: bool) -> None:
    objective = PolicyGradient(GrpoObjective(name="grpo", **keys))
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64) / 4
    forbidden = torch.arange(VOCABULARY) >= VOCABULARY - 5
    exact = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not is_frozen)]
    wanted = plain(objective, exact[0], exact[1], forbidden)
    wanted.loss.backward()
    given = hidden.float().requires_grad_()
    head = head_of(weight.float(), objective, forbidden)
    head.weight.requires_grad_(not is_frozen)
    labels, examples = rows()
    numbers = StepNumbers(torch.tensor([0.01], dtype=torch.float64), torch.zeros((), dtype=torch.float64))
    found = head(given, labels, numbers, examples)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-5)
    assert found.sums.tolist() == pytest.approx(wanted.sums.tolist(), rel=1e-5, abs=1e-6)
    pairs = [(given.grad, exact[0].grad), (head.weight.grad, exact[1].grad)]
    for mine, theirs in pairs[: 1 if is_frozen else 2]:
        assert mine is not None
        assert theirs is not None
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 1e-5
    if not is_frozen:
        assert head.weight.grad is not None
        assert not head.weight.grad[forbidden].any()


def test_log_probs_are_those_of_the_ids_that_are_drawn() -> None:
    """They are the bits that the loss computes, and probabilities of the allowed ids add up to 1."""
    objective = PolicyGradient(GrpoObjective(name="grpo"))
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(2, TOKENS, WIDTH, generator=generator),
        torch.randn(VOCABULARY, WIDTH, generator=generator),
    )
    labels, examples = rows()
    forbidden = torch.arange(VOCABULARY) >= VOCABULARY - 5
    total = torch.zeros(sum(LENGTHS))
    for token in range(VOCABULARY - 5):
        every = torch.where(labels == IGNORE_INDEX, IGNORE_INDEX, token)
        total += head_of(weight, objective, forbidden)(hidden, every, examples=examples, wants_log_probs=True).exp()
    assert total == pytest.approx(torch.ones_like(total), rel=1e-5)
    head = head_of(weight, objective, None)
    logp = head(hidden, labels, examples=examples, wants_log_probs=True)
    assert (logp.shape, logp.dtype) == ((sum(LENGTHS),), torch.float32)
    known = torch.full((2, TOKENS), torch.nan)
    known[labels != IGNORE_INDEX] = logp
    assert examples.answers is not None
    on_policy = replace(examples, answers=AnswerNumbers(known, known, known))
    sums = dict(zip(objective.sum_names, head(hidden, labels, None, on_policy).sums.tolist(), strict=True))
    assert sums["ratio"] == sums["mismatch_weight"] == sums["tokens_of_reference"] == sum(LENGTHS)
    assert sums["kl"] == sums["mismatch"] == sums["approx_kl"] == 0


def test_a_forward_without_answers_has_a_loss_of_zero() -> None:
    labels, examples = rows()
    head = head_of(torch.randn(VOCABULARY, WIDTH), PolicyGradient(GrpoObjective(name="grpo")), None)
    hidden = torch.randn(2, TOKENS, WIDTH).requires_grad_()
    found = head(hidden, torch.full_like(labels, IGNORE_INDEX), None, replace(examples, answers=None))
    found.loss.backward()
    assert (found.loss.item(), found.sums.abs().max().item()) == (0, 0)
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert not hidden.grad.any()
    assert not head.weight.grad.any()
