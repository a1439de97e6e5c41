"""The feature for models with routed experts: counts each expert's tokens, and adds a load-balancing loss (DeepSeek-V2,
arXiv 2405.04434, eq. 23-25; DeepSeek-V3, arXiv 2412.19437, eq. 17-20; Switch Transformer, arXiv 2101.03961, eq. 4-6).
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from transformers import PretrainedConfig

from ds_finetune.families.table import family_of
from ds_finetune.features.feature import Feature, RankParts
from ds_finetune.model.build.meta_model import described
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.model.parallel.sequence import SequenceParallelGroup
from ds_finetune.model.routers import (
    RouterChoices,
    RouterCollector,
    RouterOutput,
    check_each_counted,
    choices_of,
    score_shares,
    table_of_choices,
    update_biases,
)
from ds_finetune.objectives.objective import LossAndSums, Term
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.name_patterns import patterns_of
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.plan.trained_parts import RouterPlan, plan_routers


class BalanceLoss(ExtraLoss):
    """Counts the tokens that routers send to each expert and, with a weight, adds the balance loss `sum_i f_i P_i`,
    summed over layers and averaged over documents.

    f_i is the number of experts times the fraction of the document's choices that fall on expert i. P_i is the mean of
    expert i's normalised router scores. With an even load the sum over experts is 1 in each layer.
    """

    name = "routers"

    def __init__(self, routers: RouterCollector, sp_group: SequenceParallelGroup | None) -> None:
        weight = routers.plan.section.balance
        self.terms, self.sum_names = ((Term("documents", weight),), ("balance",)) if weight else ((), ())
        self.routers, self._sp_group = routers, sp_group
        routers.keeps_outputs = bool(weight)

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Metric `balance_loss`: mean over documents and layers, without the loss weight; empty if the loss is off."""
        if not self.terms:
            return {}
        return {"balance_loss": sums["balance"] / max(counts["documents"], 1) / len(self.routers.plan.balanced)}

    def listen(self, rows: ForwardRows, *, is_counting: bool, is_first: bool) -> AbstractContextManager[None]:
        """Context of a forward that collects routers' outputs, to count choices and compute the balance loss."""
        if not is_counting and not self.routers.keeps_outputs:
            return nullcontext()
        return self.routers.listen(rows, is_counting=is_counting, counts_tokens=is_first)

    def counted(self, mesh: Mesh) -> torch.Tensor:
        """Return this rank's counts of chosen experts since the last call, and set them to zero."""
        table = table_of_choices(self.routers, mesh)
        self.routers.clear()
        return table

    def finish_step(
        self, on_device: torch.Tensor, on_host: torch.Tensor, *, num_tokens: int, is_skipped: bool
    ) -> RouterChoices:
        """Check that the counts of chosen experts, summed over ranks, match the step's number of tokens. Update router
        biases by the counts, unless the step was skipped. Returns the counts.
        """
        choices = choices_of(on_host, self.routers.plan)
        check_each_counted(choices, self.routers.plan, num_tokens=num_tokens)
        if self.routers.plan.section.bias_update and not is_skipped:
            update_biases(self.routers, on_device)
        return choices

    def loss(self, rows: ForwardRows, hidden: torch.Tensor, weights: torch.Tensor) -> LossAndSums | None:
        """Balance loss of a forward, times the loss weight. A sequence parallel rank sums over its own tokens."""
        outputs = self.routers.outputs
        loss = self._balance(outputs, weights) if outputs else None
        self.routers.release()
        return loss

    def _balance(self, outputs: Sequence[RouterOutput], weights: torch.Tensor) -> LossAndSums:
        counts = torch.stack([self._count_choices(output) for output in outputs])
        if self._sp_group is not None:
            counts = self._sp_group.all_reduce(counts)
        documents, lengths = self.routers.tokens
        per_token, experts = outputs[0].chosen.shape[1], counts.shape[-1]
        # f_i / T for a document of T tokens: they multiply scores that are summed over tokens, but P_i is a mean.
        factors = counts * (experts / per_token / lengths.double().square()[:, None])
        scores, pairs = self.routers.plan.kind.scores, zip(outputs, factors.float(), strict=True)
        sums = [_SumOfLayer.apply(output.logits, documents, factor, scores) for output, factor in pairs]
        total = torch.stack(sums).sum()
        return LossAndSums(total * weights[0].to(total.dtype), total.detach().double()[None])

    @torch.no_grad()
    def _count_choices(self, output: RouterOutput) -> torch.Tensor:
        logits, chosen = output
        documents, lengths = self.routers.tokens
        if self.routers.plan.kind.scores != "softmax":
            # The loss counts the experts with the highest scores, without biases and groups (DeepSeek-V3, eq. 18).
            chosen = logits.float().topk(chosen.shape[1], dim=-1).indices
        experts = logits.shape[-1]
        counts = torch.zeros((len(lengths) + 1) * experts, dtype=torch.int64, device=logits.device)
        cells = (documents[:, None] * experts + chosen).reshape(-1)
        return counts.index_add_(0, cells, torch.ones_like(cells)).view(-1, experts)[:-1]


class _SumOfLayer(torch.autograd.Function):
    """Balance loss of a layer, `sum_i f_i P_i` summed over documents, fp32 scalar. The input `factors`, fp32
    [documents, experts], is f_i / T for a document of T tokens. The logits are the only tensor
    [tokens, experts] that is saved for backward.
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
        probabilities = score_shares(logits, scores)
        sums = probabilities.new_zeros(len(factors) + 1, probabilities.shape[1]).index_add(0, documents, probabilities)
        return (sums[:-1] * factors).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        logits, documents, factors = ctx.saved_tensors
        d_shares = functional.pad(factors, (0, 0, 0, 1)).index_select(0, documents) * grad
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            (d_logits,) = torch.autograd.grad(score_shares(leaf, ctx.scores), leaf, d_shares)
        return d_logits, None, None, None


class RouterFeature(Feature):
    """Counts the tokens of each expert, for metrics and bias updates. Balances the load if the run file asks for it."""

    name = "routers"

    settings: RouterPlan

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> RouterPlan | None:
        """Plan the training of routers; None for a model without routers."""
        return plan_routers(run.router, described(hf_config))

    def complete(self, plan: Plan) -> Plan:
        """Freeze router weights if the run file asks for it, with a note in the plan."""
        if self.settings.section.train:
            return plan
        hf_config = self.model.hf_config
        names = self.settings.parameters(mtp_layers(hf_config), family_of(hf_config.model_type).mtp_module)
        note = f"frozen: {len(names)} weights of routers, since router.train is false: {patterns_of(names)}"
        return replace(plan, frozen=(*plan.frozen, *names), notes=(*plan.notes, note))

    def extra_loss(self, trained: TrainedModel, parts: RankParts) -> ExtraLoss:
        """Make the loss that counts the experts' tokens and, if it has a weight, balances their load."""
        return BalanceLoss(RouterCollector(trained.lm, self.settings, device=parts.device), parts.groups.sp)
