"""The indexers of DeepSeek sparse attention that a run trains, and the plan's line about them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.config.sections import IndexerConfig
from ds_finetune.families.layer_rules import indexed_layers


@dataclass(frozen=True)
class IndexerPlan:
    """Indexers that a run trains."""

    layers: tuple[int, ...]
    """Indices of the layers that have an indexer, counted over all pipeline stages."""
    section: IndexerConfig

    @property
    def trains_only_indexers(self) -> bool:
        """Whether only indexers are trained, with attention to all earlier tokens (stage `dense_warmup`)."""
        return self.section.stage == "dense_warmup"

    def lines(self) -> list[tuple[str, str]]:
        """Plan line about indexers."""
        how = (
            "alone, by attention to all earlier tokens"
            if self.trains_only_indexers
            else "by attention to the tokens they choose"
        )
        loss = f"plus {self.section.weight:g} x their divergence, a mean over the tokens of the global batch"
        return [("indexers", f"{len(self.layers)}, trained {how}; {loss}")]


def plan_indexer(section: IndexerConfig, model: Mapping[str, Any]) -> IndexerPlan | None:
    """The indexers that the run trains; None if it trains none, or the model has none."""
    return IndexerPlan(indexed_layers(model), section) if section.train else None
