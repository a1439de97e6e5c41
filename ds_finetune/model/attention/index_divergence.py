"""How far an indexer's scores are from the weights of attention: a divergence for each query, document by document."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ds_finetune.model.parallel.rank_group import RankGroup

SCORES_AT_ONCE = 2**27
"""Scores that are computed at a time, fp32 [heads, queries, keys]: 0.5 GiB."""


class ScoreInputs(NamedTuple):
    """What scores of an indexer are computed from; of one document without the first dimension."""

    query: torch.Tensor
    """[batch, tokens, heads, width]"""
    key: torch.Tensor
    """[batch, tokens, width]; with a cache there are more keys than queries."""
    weight: torch.Tensor
    """fp32 [batch, tokens, heads]"""


@dataclass(frozen=True)
class Attended:
    """The attention of a layer that an indexer follows."""

    query: torch.Tensor
    """[batch, heads, tokens, width], of this rank's heads."""
    key: torch.Tensor
    """As `query`."""
    scaling: float
    groups: tuple[RankGroup, ...]
    """Ranks that have the other heads."""


@dataclass(frozen=True)
class _Scales:
    index: float
    attention: float
    groups: tuple[RankGroup, ...]


def index_scores(part: ScoreInputs, scale: float) -> torch.Tensor:
    """An indexer's score of each key for each query of one document, fp32 [queries, keys]: the sum over heads of
    w ReLU(q k) (DeepSeek-V3.2's report, eq. 1).
    """
    scores = (part.query.float() @ part.key.float().T * scale).relu()
    return (part.weight[:, None] @ scores)[:, 0]


def divergences(
    scored: ScoreInputs,
    scale: float,
    attended: Attended,
    *,
    documents: Sequence[Sequence[int]],
    chosen: Sequence[Sequence[torch.Tensor | None]] | None,
) -> torch.Tensor:
    """D_KL(p || softmax(I)) of each query in nats, fp32 [batch, tokens]; its gradient is that of `scored` alone.

    `documents` are the lengths of the documents of each row. `chosen` are the tokens that a query attends to, bool
    [queries, keys] for each document; with None, for all or for one, they are all earlier ones.
    """
    scales = _Scales(scale, attended.scaling, attended.groups)
    rows = []
    for row, lengths in enumerate(documents):
        index = [part[row].split(tuple(lengths)) for part in scored]
        attention = [part[row].detach().split(tuple(lengths), dim=1) for part in (attended.query, attended.key)]
        masks = [None] * len(lengths) if chosen is None else chosen[row]
        parts = zip(*index, *attention, masks, strict=True)
        rows.append(torch.cat([_DivergenceOfDocument.apply(*part, scales) for part in parts]))
    return torch.stack(rows)


class _DivergenceOfDocument(torch.autograd.Function):
    """The divergence of each query of one document, fp32 [queries].

    Numbers for each pair of tokens are computed for some queries at a time, and again in backward.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd passes its inputs by position
        ctx: Any,  # noqa: ANN401
        index_query: torch.Tensor,
        index_key: torch.Tensor,
        index_weight: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        chosen: torch.Tensor | None,
        scales: _Scales,
    ) -> torch.Tensor:
        ctx.save_for_backward(index_query, index_key, index_weight, query, key, chosen)
        ctx.scales = scales
        index = ScoreInputs(index_query, index_key, index_weight)
        return torch.cat(
            [_divergence(_part(index, part), (query, key), chosen, part, scales) for part in _parts(index, query)]
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        *of_index, query, key, chosen = ctx.saved_tensors
        index = ScoreInputs(*of_index)
        found = ScoreInputs(*(torch.zeros_like(tensor, dtype=torch.float32) for tensor in index))
        for part in _parts(index, query):
            with torch.enable_grad():
                leaves = ScoreInputs(*(tensor.detach().requires_grad_() for tensor in _part(index, part)))
                values = _divergence(leaves, (query, key), chosen, part, ctx.scales)
                grads = torch.autograd.grad(values, leaves, grad[part])
            for total, of_part in zip(_part(found, part), grads, strict=True):
                total += of_part
        return (*(total.to(tensor.dtype) for total, tensor in zip(found, index, strict=True)), None, None, None, None)


def _parts(index: ScoreInputs, query: torch.Tensor) -> Iterator[slice]:
    """Some queries of a document at a time."""
    tokens, heads = len(index.query), max(index.query.shape[1], query.shape[0])
    at_once = max(1, SCORES_AT_ONCE // (tokens * heads))
    for begin in range(0, tokens, at_once):
        yield slice(begin, min(begin + at_once, tokens))


def _part(index: ScoreInputs, part: slice) -> ScoreInputs:
    """The queries of `part`, and the keys up to the last of them."""
    return ScoreInputs(index.query[part], index.key[: part.stop], index.weight[part])


def _divergence(
    index: ScoreInputs,
    attention: tuple[torch.Tensor, torch.Tensor],
    chosen: torch.Tensor | None,
    part: slice,
    scales: _Scales,
) -> torch.Tensor:
    """The divergence of the queries of `part`, fp32 [queries]; `index` has these queries, `attention` all."""
    query, key = attention
    if chosen is None:
        positions = torch.arange(part.stop, device=query.device)
        is_seen = positions <= positions[part, None]
    else:
        is_seen = chosen[part, : part.stop]
    with torch.no_grad():
        logits = query[:, part].float() @ key[:, : part.stop].float().transpose(1, 2) * scales.attention
        weights = logits.masked_fill(~is_seen, float("-inf")).softmax(dim=-1).sum(dim=0)
        for group in scales.groups:
            weights = group.all_reduce(weights)
        weights /= weights.sum(dim=-1, keepdim=True)
    scores = index_scores(index, scales.index).masked_fill(~is_seen, float("-inf"))
    # Where nothing is seen the logarithm is -inf and the weight 0.
    logs = scores.log_softmax(dim=-1).masked_fill(~is_seen, 0.0)
    return (torch.xlogy(weights, weights) - weights * logs).sum(dim=-1)
