"""Losses of documents' log-probabilities equal autograd over whole logits in fp64."""

from typing import Any, NamedTuple

import pytest
import torch

from ds_finetune.config.objectives import CpoObjective, DpoObjective, KtoObjective, OrpoObjective, SimpoObjective
from ds_finetune.model.loss import log_probs
from ds_finetune.model.loss.head_chunks import CHUNK_TOKENS, HeadInputs, softmax_of_chunk
from ds_finetune.model.loss.log_probs import DocumentTokens, LossOfDocuments, TwoPassHead, loss_of_log_probs
from ds_finetune.objectives.objective import (
    DocumentLogProbs,
    DocumentObjective,
    Examples,
    LossAndSums,
    StepNumbers,
    make_objective,
)
from tests.rounding import rounding

WIDTH, VOCABULARY = 16, 50
LENGTHS = (5, 9, 1, 4, 33, 2, 17, 40)
"""Supervised tokens of each document; with chunks of 7 and 16, documents begin and end within chunks."""
OBJECTIVES = (
    DpoObjective(name="dpo"),
    DpoObjective(name="dpo", label_smoothing=0.2, nll_weight=0.5),
    DpoObjective(name="dpo", loss="ipo"),
    DpoObjective(name="dpo", loss="apo_down"),
    SimpoObjective(name="simpo"),
    CpoObjective(name="cpo"),
    OrpoObjective(name="orpo"),
    KtoObjective(name="kto"),
)


class Case(NamedTuple):
    """A head and documents, fp64."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    index: torch.Tensor
    examples: Examples


def case_of(lengths: tuple[int, ...] = LENGTHS, *, has_bias: bool = False) -> Case:
    generator = torch.Generator().manual_seed(3)
    tokens, documents = sum(lengths), len(lengths)
    whole = torch.arange(documents)
    return Case(
        hidden=torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64),
        weight=torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64) / 4,
        bias=torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) if has_bias else None,
        targets=torch.randint(0, VOCABULARY, (tokens,), generator=generator),
        index=whole.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        examples=Examples(
            index=torch.zeros(1, tokens, dtype=torch.int64),
            starts=whole,
            ends=whole,
            numbers=whole,
            targets=(whole % 3 == 0).double(),
            reference=-4 * torch.tensor(lengths, dtype=torch.float64) - 1,
        ),
    )


def leaves(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight and bias as leaves that require a gradient."""
    given = [tensor for tensor in (case.hidden, case.weight, case.bias) if tensor is not None]
    return tuple(tensor.to(dtype, copy=True).requires_grad_() for tensor in given)


def numbers_of(objective: DocumentObjective) -> StepNumbers:
    weights = torch.tensor([0.25, 0.01][: len(objective.terms)], dtype=torch.float64)
    return StepNumbers(weights, torch.tensor(0.3, dtype=torch.float64))


def plain_documents(case: Case, given: tuple[torch.Tensor, ...], cap: float | None = None) -> DocumentLogProbs:
    """The documents' log-probabilities from whole logits."""
    hidden, weight, *bias = given
    logits = hidden @ weight.T + (bias[0] if bias else 0)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logp = logits.log_softmax(-1).gather(1, case.targets[:, None]).squeeze(1)
    documents = range(len(case.examples.numbers))
    sums = [logp[case.index == document].sum() for document in documents]
    counts = [(case.index == document).sum().double() for document in documents]
    return DocumentLogProbs(torch.stack(sums), torch.stack(counts), case.examples.targets, case.examples.reference)


def ours(
    case: Case,
    given: tuple[torch.Tensor, ...],
    objective: DocumentObjective,
    chunk: int,
    cap: float | None = None,
) -> LossAndSums:
    hidden, weight, *bias = given
    loss = LossOfDocuments(objective, DocumentTokens(case.index, case.examples), numbers_of(objective))
    return document_loss(HeadInputs(hidden, weight, bias[0] if bias else None, case.targets, cap), loss, chunk=chunk)


def document_loss(inputs: HeadInputs, loss: LossOfDocuments, chunk: int = CHUNK_TOKENS) -> LossAndSums:
    return loss_of_log_probs(inputs, loss, TwoPassHead(inputs, chunk=chunk))


def relative(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    assert found is not None
    assert wanted is not None
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk", [7, 16, 1024])
@pytest.mark.parametrize("section", OBJECTIVES, ids=lambda section: f"{section.name}-{getattr(section, 'loss', '')}")
def test_loss_and_gradients_equal_autograd(section: Any, chunk: int, has_bias: bool) -> None:
    case, objective = case_of(has_bias=has_bias), make_objective(section)
    assert isinstance(objective, DocumentObjective)
    exact, given = leaves(case, torch.float64), leaves(case, torch.float32)
    documents = plain_documents(case, exact)
    documents.logp.retain_grad()
    wanted = objective.loss(documents, *numbers_of(objective))
    (wanted.loss * 3).backward()
    found = ours(case, given, objective, chunk)
    (found.loss * 3).backward()
    # Log-probabilities of documents cancel in differences; each comes of sums over the width and over the vocabulary.
    assert documents.logp.grad is not None
    parts_of_loss = float((documents.logp.grad / 3 * documents.logp).detach().abs().sum())
    loss_limit, limit = (
        rounding(magnitude, WIDTH + VOCABULARY)
        for magnitude in (parts_of_loss, float(documents.logp.detach().abs().sum()))
    )
    assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=0, abs=loss_limit)
    assert found.sums.tolist() == pytest.approx(wanted.sums.tolist(), rel=0, abs=limit)
    assert max(relative(mine.grad, theirs.grad) for mine, theirs in zip(given, exact, strict=True)) < 1e-5


def dpo() -> DocumentObjective:
    objective = make_objective(DpoObjective(name="dpo"))
    assert isinstance(objective, DocumentObjective)
    return objective


@pytest.mark.parametrize("chunk", [7, 1024])
def test_a_frozen_head_needs_one_pass(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of()
    trained, frozen = leaves(case, torch.float32), leaves(case, torch.float32)
    frozen[1].requires_grad_(requires_grad=False)
    ours(case, trained, dpo(), chunk).loss.backward()
    calls = []
    monkeypatch.setattr(log_probs, "softmax_of_chunk", lambda *args: calls.append(1) or softmax_of_chunk(*args))
    monkeypatch.setattr(log_probs.TwoPassHead, "gradients", None)
    ours(case, frozen, dpo(), chunk).loss.backward()
    assert len(calls) == -(-sum(LENGTHS) // chunk)
    assert frozen[1].grad is None
    assert trained[0].grad is not None
    assert relative(frozen[0].grad, trained[0].grad) < 1e-5


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_a_soft_cap_of_logits_has_the_gradients_of_autograd(chunk: int, is_frozen: bool) -> None:
    """In one pass with a frozen head, in two with a trained one."""
    case, cap = case_of(has_bias=True), 0.7
    exact, given = leaves(case, torch.float64), leaves(case, torch.float32)
    for tensor in given[1:]:
        tensor.requires_grad_(not is_frozen)
    dpo().loss(plain_documents(case, exact, cap), *numbers_of(dpo())).loss.backward()
    ours(case, given, dpo(), chunk, cap).loss.backward()
    for mine, theirs in zip(given[: 1 if is_frozen else None], exact, strict=False):
        assert relative(mine.grad, theirs.grad) < 1e-5


def test_a_second_pass_does_not_compute_the_last_chunk_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case, calls = case_of(), []
    plain = log_probs.logits_of_chunk
    monkeypatch.setattr(log_probs, "logits_of_chunk", lambda *args: calls.append(1) or plain(*args))
    for chunk, wanted in ((1024, 1), (40, 2 * 3 - 1)):
        calls.clear()
        ours(case, leaves(case, torch.float32), dpo(), chunk).loss.backward()
        assert len(calls) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_numbers_with_and_without_gradients(dtype: torch.dtype) -> None:
    """So that a model's log-ratio to itself as reference is exactly 0."""
    case = case_of()
    given = leaves(case, dtype)
    tokens = DocumentTokens(case.index, case.examples)
    inputs = HeadInputs(given[0], given[1], None, case.targets)
    logp = tokens.sums(TwoPassHead(inputs).log_probs()).logp
    same = case._replace(examples=Examples(**{**vars(case.examples), "reference": logp}))
    found = ours(same, given, dpo(), 1024)
    found.loss.backward()
    margin = dpo().sum_names.index("reward_margin")
    assert found.sums[margin].item() == 0
    assert found.sums[0].item() == pytest.approx(4 * 0.6931471805599453, rel=1e-12)
    assert logp.dtype == torch.float64
    with torch.no_grad():
        assert torch.equal(ours(same, given, dpo(), 1024).sums, found.sums)


def test_bf16_keeps_sums_exact_and_gradients_close() -> None:
    case = case_of()
    given = leaves(case, torch.bfloat16)
    rounded = tuple(tensor.detach().double().requires_grad_() for tensor in given)
    wanted = dpo().loss(plain_documents(case, rounded), *numbers_of(dpo()))
    wanted.loss.backward()
    found = ours(case, given, dpo(), 16)
    found.loss.backward()
    # Logits are rounded to bf16 once, as in the cross entropy.
    assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=2e-2)
    assert max(relative(mine.grad, theirs.grad) for mine, theirs in zip(given, rounded, strict=True)) < 2e-2


def test_small_gradients_survive_fp16() -> None:
    """The loss scale multiplies them in backward only."""
    case = case_of()
    given, exact = leaves(case, torch.float16), leaves(case, torch.float64)
    factor = 2.0**16
    weights = torch.tensor([1e-7], dtype=torch.float64)
    tokens = DocumentTokens(case.index, case.examples)
    numbers = StepNumbers(weights, weights.new_zeros(()))
    wanted = dpo().loss(plain_documents(case, exact), *numbers).loss * factor
    wanted.backward()
    inputs = HeadInputs(given[0], given[1], None, case.targets)
    (document_loss(inputs, LossOfDocuments(dpo(), tokens, numbers)).loss * factor).backward()
    assert max(relative(mine.grad, theirs.grad) for mine, theirs in zip(given, exact, strict=True)) < 1e-2


@pytest.mark.parametrize("lengths", [(), (0, 0), (3, 0)])
def test_documents_without_supervised_tokens(lengths: tuple[int, ...]) -> None:
    case = case_of(lengths)
    given = leaves(case, torch.float32)
    found = ours(case, given, dpo(), 1024)
    found.loss.backward()
    assert found.loss.isfinite()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in given)
    if not sum(lengths):
        assert torch.equal(given[1].grad, torch.zeros_like(given[1]))  # type: ignore[arg-type]
