"""The loss of distillation and its gradients against autograd in fp64 on whole logits."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from ds_finetune.model.loss.head_chunks import HeadInputs, NeededGradients
from ds_finetune.model.loss.soft_targets import (
    Mix,
    SoftTargets,
    TeacherStates,
    TopTargets,
    chunked_mixed_loss,
    top_log_probs,
)
from tests.rounding import rounding

TOKENS, WIDTH, TEACHER_WIDTH, VOCABULARY = 23, 16, 24, 50
EVERY = NeededGradients(hidden=True, weight=True, bias=True)
MIXES = [Mix(t, w) for t, w in itertools.product((1.0, 2.5), (0.0, 0.3))]


def head(width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and bias whose logits are as far apart as those of a trained model."""
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, width, generator=made)
    weight = torch.randn(VOCABULARY, width, generator=made)
    return hidden, weight, torch.randn(VOCABULARY, generator=made)


def labels() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(2))


def teacher_states(temperature: float = 1.0) -> TeacherStates:
    return TeacherStates(*head(TEACHER_WIDTH, 1), temperature)


def teacher_log_probs(temperature: float = 1.0, cap: float | None = None) -> torch.Tensor:
    hidden, weight, bias = (part.double() for part in head(TEACHER_WIDTH, 1))
    return torch.log_softmax(capped(hidden @ weight.T + bias, cap) / temperature, dim=-1)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def top_targets(k: int, dtype: torch.dtype = torch.float64) -> TopTargets:
    wanted = teacher_log_probs()
    top, ids = wanted.topk(k, dim=-1)
    others = wanted.scatter(1, ids, float("-inf")).logsumexp(-1, keepdim=True)
    return TopTargets(ids.int(), torch.cat([top, others], dim=-1).to(dtype))


def expected(
    mix: Mix, wanted: torch.Tensor, ids: torch.Tensor | None = None, cap: float | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss and its gradients by autograd in fp64; with `ids`, of these tokens and of all others together."""
    hidden, weight, bias = (part.double().requires_grad_() for part in head(WIDTH, 0))
    logits = capped(hidden @ weight.T + bias, cap)
    log_probs = torch.log_softmax(logits / mix.temperature, dim=-1)
    if ids is not None:
        wanted, log_probs = (_buckets(values, ids) for values in (wanted, log_probs))
    divergence = (wanted.exp() * (wanted - log_probs)).sum()
    label_loss = functional.cross_entropy(logits, labels(), reduction="sum")
    loss = mix.label_weight * label_loss + (1 - mix.label_weight) * mix.temperature**2 * divergence
    loss.backward()
    grads = [part.grad for part in (hidden, weight, bias)]
    return loss.detach(), [grad for grad in grads if grad is not None]


def _buckets(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    top = log_probs.gather(1, ids.long())
    others = (1 - top.exp().sum(-1, keepdim=True)).log()
    return torch.cat([top, others], dim=-1)


def assert_equal(
    targets: SoftTargets,
    mix: Mix,
    wanted: tuple[torch.Tensor, list[torch.Tensor]],
    *,
    chunk: int = 7,
    cap: float | None = None,
) -> None:
    found = chunked_mixed_loss(HeadInputs(*head(WIDTH, 0), labels(), cap), targets, EVERY, mix=mix, chunk=chunk)
    assert found.loss.item() == pytest.approx(wanted[0].item(), rel=1e-6)
    for mine, theirs in zip(found.gradients, wanted[1], strict=True):
        assert mine is not None
        assert (mine - theirs).norm() / theirs.norm() < 1e-5


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_a_teacher_of_another_width_gives_the_loss_of_autograd(mix: Mix, chunk: int) -> None:
    wanted = expected(mix, teacher_log_probs(mix.temperature))
    assert_equal(teacher_states(mix.temperature), mix, wanted, chunk=chunk)


@pytest.mark.parametrize("mix", MIXES)
def test_soft_caps_of_model_and_teacher(mix: Mix) -> None:
    wanted = expected(mix, teacher_log_probs(mix.temperature, 2.0), cap=0.7)
    assert_equal(replace(teacher_states(mix.temperature), cap=2.0), mix, wanted, cap=0.7)


def test_stored_scores_have_the_soft_cap_of_the_teacher() -> None:
    ids, log_probs = top_log_probs(*head(TEACHER_WIDTH, 1), VOCABULARY - 1, cap=2.0)
    wanted = teacher_log_probs(cap=2.0).gather(1, ids.long())
    assert float((log_probs[:, :-1] - wanted).abs().max()) < torch.finfo(torch.float16).eps * 8


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("size", [1, VOCABULARY - 9, VOCABULARY + 9])
def test_ids_that_only_one_vocabulary_has_get_no_probability(mix: Mix, size: int) -> None:
    made = torch.Generator().manual_seed(3)
    states = TeacherStates(*head(TEACHER_WIDTH, 1), mix.temperature)
    states = replace(states, weight=torch.randn(size, TEACHER_WIDTH, generator=made), bias=None)
    common = min(size, VOCABULARY)
    logits = states.hidden.double() @ states.weight[:common].double().T / mix.temperature
    # The reference loop: -1e30 has no probability in fp64 either, and no infinity times zero.
    wanted = functional.pad(torch.log_softmax(logits, dim=-1), (0, VOCABULARY - common), value=-1e30)
    assert_equal(states, mix, expected(mix, wanted))


@pytest.mark.parametrize("label_weight", [0.0, 0.3])
@pytest.mark.parametrize("k", [1, 4, 31])
def test_top_tokens_and_a_bucket_for_the_others_give_the_loss_of_autograd(k: int, label_weight: float) -> None:
    mix, targets = Mix(label_weight=label_weight), top_targets(k)
    assert_equal(targets, mix, expected(mix, teacher_log_probs(), targets.ids))


def test_with_one_token_in_the_bucket_the_loss_is_that_of_the_whole_distribution() -> None:
    """k = V - 1: nothing is lost."""
    assert_equal(top_targets(VOCABULARY - 1), Mix(), expected(Mix(), teacher_log_probs()))


def test_half_precision_of_stored_numbers_costs_a_thousandth() -> None:
    wanted, _ = expected(Mix(), teacher_log_probs())
    found = chunked_mixed_loss(
        HeadInputs(*head(WIDTH, 0), labels()), top_targets(VOCABULARY - 1, torch.float16), EVERY, mix=Mix()
    )
    assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-3)


@pytest.mark.parametrize("targets", [TeacherStates(*head(WIDTH, 0), 1.0), None], ids=["teacher", "none"])
def test_an_equal_teacher_leaves_no_loss_and_none_leaves_that_of_the_labels(targets: SoftTargets | None) -> None:
    hidden, weight, bias = head(WIDTH, 0)
    found = chunked_mixed_loss(HeadInputs(hidden, weight, bias, labels()), targets, EVERY, mix=Mix())
    wanted = functional.cross_entropy(hidden @ weight.T + bias, labels(), reduction="sum").item()
    assert found.sums[2].item() == pytest.approx(wanted, rel=1e-6)
    # With an equal teacher, the log-probabilities of both cancel, each weighted with its probability.
    log_probs = (hidden @ weight.T + bias).log_softmax(-1)
    limit = rounding(float((log_probs.exp() * log_probs).abs().sum()), WIDTH + VOCABULARY)
    assert found.loss.item() == pytest.approx(0 if targets else wanted, rel=1e-6, abs=limit)
    assert found.sums[3] == ((hidden @ weight.T + bias).argmax(-1) == labels()).sum()


def test_a_model_that_is_sure_of_the_top_tokens_keeps_finite_gradients() -> None:
    """All that is left for the others underflows in fp32."""
    hidden, weight, bias = head(WIDTH, 0)
    targets = top_targets(4)
    weight, bias = torch.zeros_like(weight), torch.full_like(bias, -300.0)
    bias[targets.ids[0].long()] = 0.0
    one = replace(targets, ids=targets.ids[:1], log_probs=targets.log_probs[:1])
    found = chunked_mixed_loss(HeadInputs(hidden[:1], weight, bias, labels()[:1]), one, EVERY, mix=Mix())
    assert found.loss.isfinite()
    assert found.gradients.d_bias is not None
    assert found.gradients.d_bias.isfinite().all()
    magnitude = float(found.gradients.d_bias.abs().sum())
    assert magnitude > 1e-3
    assert found.gradients.d_bias.sum().item() == pytest.approx(0, abs=rounding(magnitude, VOCABULARY))


def test_only_what_is_needed_is_computed() -> None:
    needed = NeededGradients(hidden=True, weight=False, bias=False)
    found = chunked_mixed_loss(HeadInputs(*head(WIDTH, 0), labels()), teacher_states(), needed, mix=Mix())
    assert found.gradients.d_hidden is not None
    assert found.gradients.d_weight is found.gradients.d_bias is None
