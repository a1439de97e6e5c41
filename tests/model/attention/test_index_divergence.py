"""The divergence of an indexer's scores from attention, computed for some queries at a time."""

import pytest
import torch

from ds_finetune.model.attention import indexed_attention
from ds_finetune.model.attention.indexed_attention import ScoreInputs, _DocumentWeights, divergences

DOCUMENTS = ((7, 5), (12,))
CHOSEN = ((None, torch.eye(5, dtype=torch.bool) | (torch.arange(5) == 0)), (torch.ones(12, 12).tril().bool(),))


def _inputs() -> tuple[ScoreInputs, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    scored = ScoreInputs(torch.randn(2, 12, 6, 8), torch.randn(2, 12, 8), torch.randn(2, 12, 6))
    attended = torch.randn(2, 4, 12, 10), torch.randn(2, 4, 12, 10)
    return ScoreInputs(*(tensor.requires_grad_() for tensor in scored)), attended


def _gradients() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    scored, attended = _inputs()
    values = divergences(scored, _DocumentWeights(0.5, (), 0.3), attended, documents=DOCUMENTS, chosen=CHOSEN)
    return values, torch.autograd.grad((values * torch.arange(24).view(2, 12)).sum(), scored)


def test_queries_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, grads = _gradients()
    monkeypatch.setattr(indexed_attention, "SCORES_AT_ONCE", 12 * 6 * 5)
    parts, grads_of_parts = _gradients()
    assert torch.allclose(parts, whole, atol=1e-6)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(grads, grads_of_parts, strict=True))


def test_a_query_that_sees_one_token_has_none() -> None:
    values, _ = _gradients()
    assert values[0, 0] == values[0, 7] == values[1, 0] == 0
    assert (values[0, 1:7] > 0).all()


def test_scores_that_are_attention_have_none() -> None:
    """Where all heads attend alike, and the indexer scores as they do."""
    _, attended = _inputs()
    query, key = (part.abs()[:, :1].expand(-1, 4, -1, -1) for part in attended)
    scored = ScoreInputs(query[:, 0, :, None], key[:, 0], torch.full((2, 12, 1), 0.3))
    values = divergences(scored, _DocumentWeights(1.0, (), 0.3), (query, key), documents=DOCUMENTS, chosen=None)
    assert values.abs().max() < 1e-6
