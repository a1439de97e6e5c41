"""Computes the loss of indexers from the divergences of this rank's layers in a forward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from ds_finetune.model.attention.indexed_attention import DivergenceCollector, train_indexers
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.objectives.indexing import Indexing
from ds_finetune.objectives.objective import LossAndSums


class IndexerLoss(ExtraLoss):
    """The loss of `objectives/indexing.py` for the layers of this rank."""

    def __init__(self, extra: Indexing, lm: PreTrainedModel, collector: DivergenceCollector) -> None:
        super().__init__(extra)
        self._collector = collector
        self._shares = _shares(train_indexers(lm, collector))

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Collect the divergences of the forward that runs inside."""
        self._collector.is_listening = True
        try:
            yield
        finally:
            self._collector.is_listening = False

    def loss(self, rows: ForwardRows, hidden: torch.Tensor, weights: torch.Tensor) -> LossAndSums | None:
        """The contribution of the real tokens of `rows`; sequence parallel ranks contribute their tokens' parts."""
        found = dict(self._collector.found)
        self._collector.found.clear()
        if not found:
            return None
        assert found.keys() == self._shares.keys(), (found.keys(), self._shares.keys())
        each = torch.stack([found[layer].reshape(-1) * share for layer, share in self._shares.items()])
        assert rows.real is not None, "the rows do not say where padding begins"
        total = each.masked_fill(~rows.real.is_real, 0.0).sum()
        return LossAndSums(total * weights[0].to(total.dtype), total.detach().double()[None])


def _shares(layers: Sequence[tuple[int, bool]]) -> dict[int, float]:
    """What the divergence of each layer counts: one over the number of layers that share its indexer's choice."""
    indexers, served = list[int](), dict[int, int]()
    for _, has_indexer in layers:
        indexers.append(len(served) if has_indexer else len(served) - 1)
        served[indexers[-1]] = served.get(indexers[-1], 0) + 1
    return {layer: 1 / served[indexer] for (layer, _), indexer in zip(layers, indexers, strict=True)}
