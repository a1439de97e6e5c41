"""The indexers of DeepSeek sparse attention that a run trains, and the line of the plan about them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.config.sections import IndexerConfig
from ds_finetune.families.layer_rules import indexed_layers


@dataclass(frozen=True)
class IndexerPlan:
    """The indexers of a model that a run trains."""

    layers: tuple[int, ...]
    """Numbers of the layers that have one, of the whole model."""
    section: IndexerConfig

    @property
    def is_alone(self) -> bool:
        """Whether nothing else is trained, and attention is to all earlier tokens."""
        return self.section.stage == "dense_warmup"

    def lines(self) -> list[tuple[str, str]]:
        """Name and text of the decision, for people."""
        how = "alone, by attention to all earlier tokens" if self.is_alone else "by attention to the tokens they choose"
        loss = f"plus {self.section.weight:g} x their divergence, a mean over the tokens of the global batch"
        return [("indexers", f"{len(self.layers)}, trained {how}; {loss}")]


def plan_indexer(section: IndexerConfig, model: Mapping[str, Any]) -> IndexerPlan | None:
    """The indexers that the run file trains of the model with this config.json; None where it trains none."""
    return IndexerPlan(indexed_layers(model), section) if section.train else None
