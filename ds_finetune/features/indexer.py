"""The feature that trains the indexers of sparse attention towards the attention weights of their layers."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.features.feature import Feature, RankParts
from ds_finetune.foreign.guard import replaced
from ds_finetune.model.attention.indexed_attention import DivergenceCollector, train_indexers
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.objectives.objective import LossAndSums, Term
from ds_finetune.plan.settings import RunSettings
from ds_finetune.plan.trained_parts import IndexerPlan, plan_indexer


class IndexerLoss(ExtraLoss):
    """Auxiliary loss of indexers: for each query D_KL(p || softmax(I)), summed over indexers, averaged over all tokens.

    I are the indexer's scores of the tokens or compressed entries that the query may attend to. p is the attention's
    distribution over them, summed over heads and normalised, without a gradient. If several layers share an indexer,
    its divergences from the p of each layer are averaged (arXiv 2603.12201).
    """

    name = "indexer"
    sum_names = ("indexer",)

    def __init__(self, lm: PreTrainedModel, collector: DivergenceCollector, plan: IndexerPlan) -> None:
        self.terms = (Term("tokens", plan.section.weight),)
        self._indexers = len(plan.layers)
        self._collector = collector
        self._shares = _shares(train_indexers(lm, collector))

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The metric `indexer_loss`: divergence in nats, averaged over tokens and indexers, without the loss weight."""
        return {"indexer_loss": sums["indexer"] / max(counts["tokens"], 1) / self._indexers}

    def listen(self, rows: ForwardRows, *, is_counting: bool, is_first: bool) -> AbstractContextManager[None]:
        """Context of a forward in which attention layers pass the divergences of their indexers to this loss."""
        return replaced(self._collector, "is_listening", True)

    def loss(self, rows: ForwardRows, hidden: torch.Tensor, weights: torch.Tensor) -> LossAndSums | None:
        """Sum of indexers' divergences, times the loss weight. Each rank sums over its own tokens except padding."""
        losses = dict(self._collector.divergences)
        self._collector.divergences.clear()
        if not losses:
            return None
        assert losses.keys() == self._shares.keys(), (losses.keys(), self._shares.keys())
        each = torch.stack([losses[layer].reshape(-1) * fraction for layer, fraction in self._shares.items()])
        assert rows.real is not None, "the rows do not say where padding begins"
        total = each.masked_fill(~rows.real.is_real, 0.0).sum()
        return LossAndSums(total * weights[0].to(total.dtype), total.detach().double()[None])


def _shares(layers: Sequence[tuple[int, bool]]) -> dict[int, float]:
    """Weight of each layer's divergence in the loss, by layer number: 1 / n if n layers share an indexer."""
    indexers, served = list[int](), dict[int, int]()
    for _, has_indexer in layers:
        indexers.append(len(served) if has_indexer else len(served) - 1)
        served[indexers[-1]] = served.get(indexers[-1], 0) + 1
    return {layer: 1 / served[indexer] for (layer, _), indexer in zip(layers, indexers, strict=True)}


class IndexerFeature(Feature):
    """Trains the indexers of sparse attention, alone or with the other weights."""

    name = "indexer"

    settings: IndexerPlan

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> IndexerPlan | None:
        """Plan the training of indexers if `indexer.train` is set, else None."""
        return plan_indexer(run.indexer, hf_config.to_dict())

    @property
    def own_loss(self) -> str:
        """Name of the indexer loss; empty if the run trains only indexers."""
        return "" if self.settings.trains_only_indexers else IndexerLoss.name

    def owns(self, name: str) -> bool:
        """Whether `name` is a parameter of an indexer; false if the run trains only indexers."""
        return bool(self.own_loss) and self.model.family.is_of_indexer(name)

    def extra_loss(self, trained: TrainedModel, parts: RankParts) -> ExtraLoss:
        """Make the loss that trains indexers towards attention weights."""
        # An indexer's target sums attention weights over heads, and thus over tensor and sequence parallel ranks. In
        # DeepSeek-V4 a sequence parallel rank has all heads of its own tokens, so only tensor parallel ranks are summed
        # over.
        others = None if self.model.family.compresses else parts.groups.sp
        ranks = tuple(group for group in (parts.groups.tp, others) if group is not None)
        collector = DivergenceCollector(ranks, attends_to_all=self.settings.trains_only_indexers)
        return IndexerLoss(trained.lm, collector, self.settings)
