"""With which settings indexers of DeepSeek sparse attention may be trained, and the line of the plan about them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_finetune.config.indexer import IndexerConfig
from ds_finetune.config.objectives import cross_entropies
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import OWN_ATTENTIONS
from ds_finetune.errors import ConfigError
from ds_finetune.families.parameters import indexed_layers
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.plan.combinations import untested_training
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.plan.mesh import Mesh


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


def plan_indexer(config: RunConfig, model: Mapping[str, Any]) -> IndexerPlan | None:
    """The indexers that the run file trains of the model with this config.json; None where it trains none.

    ConfigError where the model has none.
    """
    if not config.indexer.train:
        return None
    name = str(model.get("model_type"))
    if family_of(name).indexer is None:
        known = [other for other, family in FAMILIES.items() if family.indexer is not None]
        raise ConfigError(
            f"indexer.train true with model_type {name}, whose attention has no indexer",
            hint=f"leave indexer out; it is for {', '.join(known)}",
        )
    return IndexerPlan(indexed_layers(model), config.indexer)


def check_stages_begin_with_indexers(plan: IndexerPlan, stages: Sequence[StageLayers | None]) -> None:
    """ConfigError where a pipeline stage begins with a layer that attends to the tokens chosen in the layer before."""
    for number, layers in enumerate(stages):
        for first in (chunk[0] for chunk in (layers.chunks if layers is not None else ())):
            if first not in plan.layers:
                legal = ", ".join(map(str, plan.layers))
                raise ConfigError(
                    f"indexer.train true with parallel.pp {len(stages)}: stage {number} begins with layer {first}, "
                    "which has no indexer",
                    hint=f"let stages begin with one of layers {legal} by parallel.pp_layers",
                )


def check_indexer(mesh: Mesh, config: RunConfig, *, stage: int, offloads: Sequence[str]) -> None:
    """ConfigError where indexers would be trained with settings that no test compares with a plain loop."""
    if not config.indexer.train:
        return
    given = f"indexer.train true (stage {config.indexer.stage})"
    for what, hint in _untested(mesh, config, stage, offloads):
        raise ConfigError(f"{given} with {what} is not tested", hint=hint)


def _untested(mesh: Mesh, config: RunConfig, stage: int, offloads: Sequence[str]) -> Iterator[tuple[str, str]]:
    if config.lora is not None:
        yield "lora", "leave lora or indexer out; with adapters indexers stay as they are"
    if not config.objective.row.is_cross_entropy:
        legal = " or ".join(cross_entropies())
        yield f"objective {config.objective.name}", f"set objective to {legal}, or leave indexer out"
    if config.model.attention not in OWN_ATTENTIONS:
        yield f"model.attention {config.model.attention}", "set model.attention to sdpa"
    yield from untested_training(config, offloads)
    if stage == 0 and config.train.precision != "fp32":
        # As for multi-token prediction (plan/mtp.py): the norm of all gradients is taken there.
        yield f"zero stage {stage} in {config.train.precision}", "use zero stage 1, or fp32"
    yield from _untested_alone(mesh, config) if config.indexer.stage == "dense_warmup" else ()


def _untested_alone(mesh: Mesh, config: RunConfig) -> Iterator[tuple[str, str]]:
    """What is not tested where indexers alone are trained."""
    if mesh.pp > 1 or mesh.ep > 1:
        yield f"parallel {mesh}", "set parallel.pp and parallel.ep to 1"
    if config.router is not None:
        yield "`router`", "leave router out: routers stay as they are in this stage"
