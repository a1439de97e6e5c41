"""Computes the balance loss of experts from what the routers of this rank's layers gave in a forward."""

from typing import Any

import torch
from torch.nn import functional

from ds_finetune.model.experts.routers import RouterCollector, RouterOutput, score_shares
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.parallel.sequence import SequenceParallelGroup
from ds_finetune.objectives.extra import Extra
from ds_finetune.objectives.objective import LossAndSums


class BalanceLoss(ExtraLoss):
    """The loss of `objectives/balance.py` for the layers of this rank."""

    def __init__(self, extra: Extra, routers: RouterCollector, sp_group: SequenceParallelGroup | None) -> None:
        super().__init__(extra)
        self._routers, self._sp_group = routers, sp_group
        routers.keeps_outputs = True

    def loss(self, rows: ForwardRows, hidden: torch.Tensor, weights: torch.Tensor) -> LossAndSums | None:
        """The contribution of the documents of `rows`; sequence parallel ranks contribute the parts of their tokens."""
        outputs = self._routers.outputs
        if not outputs:
            return None
        counts = torch.stack([self._count_choices(output) for output in outputs])
        if self._sp_group is not None:
            counts = self._sp_group.all_reduce(counts)
        documents, lengths = self._routers.tokens
        per_token, experts = outputs[0].chosen.shape[1], counts.shape[-1]
        # f_i / T of each document, because P_i is a mean over its tokens too.
        factors = counts * (experts / per_token / lengths.double().square()[:, None])
        total = torch.stack(
            [
                _SumOfLayer.apply(logits, documents, factor, self._routers.plan.kind.scores)
                for (logits, _), factor in zip(outputs, factors.float(), strict=True)
            ]
        ).sum()
        return LossAndSums(total * weights[0].to(total.dtype), total.detach().double()[None])

    @torch.no_grad()
    def _count_choices(self, output: RouterOutput) -> torch.Tensor:
        """How often the tokens of each document chose each expert, int64 [documents, experts]."""
        logits, chosen = output
        documents, lengths = self._routers.tokens
        if self._routers.plan.kind.scores == "sigmoid":
            # By the scores themselves, with neither bias nor groups (DeepSeek-V3, eq. 18).
            chosen = logits.float().topk(chosen.shape[1], dim=-1).indices
        experts = logits.shape[-1]
        counts = torch.zeros((len(lengths) + 1) * experts, dtype=torch.int64, device=logits.device)
        places = (documents[:, None] * experts + chosen).reshape(-1)
        return counts.index_add_(0, places, torch.ones_like(places)).view(-1, experts)[:-1]


class _SumOfLayer(torch.autograd.Function):
    """The sum over documents of `sum_i f_i P_i` of a layer, fp32 scalar, from `factors` f_i / T, fp32 [documents,
    experts]. Of [tokens, experts] numbers it keeps the logits alone, and computes the rest again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: torch.Tensor,
        documents: torch.Tensor,
        factors: torch.Tensor,
        scores: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, documents, factors)
        ctx.scores = scores
        shares = score_shares(logits, scores)
        sums = shares.new_zeros(len(factors) + 1, shares.shape[1]).index_add(0, documents, shares)
        return (sums[:-1] * factors).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        logits, documents, factors = ctx.saved_tensors
        d_shares = functional.pad(factors, (0, 0, 0, 1)).index_select(0, documents) * grad
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            (d_logits,) = torch.autograd.grad(score_shares(leaf, ctx.scores), leaf, d_shares)
        return d_logits, None, None, None
