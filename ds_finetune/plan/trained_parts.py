"""Parts of a model that a run trains, freezes or changes: routers, indexers, and parameters by `train.only` and
`train.freeze`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from ds_finetune.config.sections import IndexerConfig, LoraConfig, RouterConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.family import Family, RouterKind
from ds_finetune.families.layer_rules import hashed_layers, indexed_layers
from ds_finetune.plan.lora_targets import (
    LoraTarget,
    Shape,
    adapted_targets,
    fully_trained_parameters,
    quantised_targets,
    targets_of,
)
from ds_finetune.plan.model_tensors import DescribedModel, FullTensor, part_of
from ds_finetune.plan.name_patterns import matching, parameter_names, patterns_of


@dataclass(frozen=True)
class RouterPlan:
    """The routers of a mixture of experts, and how a run trains, balances or freezes them."""

    kind: RouterKind
    layers: tuple[int, ...]
    """Indices of the layers that have a router, counted over all pipeline stages."""
    experts: int
    """Experts per layer."""
    per_token: int
    """Experts per token."""
    section: RouterConfig
    by_id: tuple[int, ...] = ()
    """Layers, among `layers`, in which the token id determines the experts. These layers cannot be balanced."""

    @property
    def balanced(self) -> tuple[int, ...]:
        """Layers that choose experts by scores. The balance loss and biases change these scores."""
        return tuple(layer for layer in self.layers if layer not in self.by_id)

    def parameters(self, beyond: range = range(0), module: str = "") -> tuple[str, ...]:
        """Full names of the routers' parameters. `beyond` has the numbers of multi-token prediction layers; in each of
        them the submodule `module` contains the router.
        """
        layers = (*map(str, self.layers), *(f"{layer}.{module}".rstrip(".") for layer in beyond))
        return tuple(
            f"model.layers.{layer}.{self.kind.module}.{leaf}" for layer in layers for leaf in self.kind.parameters
        )

    def lines(self) -> list[tuple[str, str]]:
        """Plan line about routers; none without a section `router`."""
        return [("routers", ", ".join(self._texts()))] if self.section != RouterConfig() else []

    def _texts(self) -> Iterator[str]:
        section = self.section
        state = "trained" if section.train else "frozen"
        layers = "1 layer, which sends" if len(self.layers) == 1 else f"{len(self.layers)} layers, which send"
        yield f"{state} in {layers} a token to {self.per_token} of {self.experts} experts"
        if section.balance:
            yield f"plus {section.balance:g} x their balance loss, a mean over the documents of the global batch"
        if section.bias_update:
            yield f"biases moved by {section.bias_update:g} after each step"
        if self.by_id and (section.balance or section.bias_update):
            yield f"but {len(self.by_id)} of the layers choose by token ids, which neither changes"


def plan_routers(section: RouterConfig | None, model: DescribedModel) -> RouterPlan | None:
    """Plan the routers of a model by the section `router` of the run file; None where the model has no known router.
    ConfigError if the section is given and no layer has routed experts.
    """
    family = model.family
    kind, keys = family.router, family.expert_keys
    if kind is None or keys is None:
        return None
    layers = tuple(
        number for number, layer in enumerate(model.tensors.layers) if layer.is_sparse and not layer.is_prediction
    )
    if not layers:
        if section is not None:
            given = ", ".join(f"{name} {getattr(section, name)}" for name in section.model_fields_set) or "empty"
            raise ConfigError(
                f"`router` ({given}) with model_type {family.model_type}, which has no routed experts in config.json",
                hint="leave `router` out",
            )
        return None
    by_id = hashed_layers(model) if kind.reads_ids else ()
    return RouterPlan(kind, layers, keys.number(model), keys.per_token(model), section or RouterConfig(), by_id)


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


class FreezePlan(NamedTuple):
    """Trained and frozen parameters of a run with `train.only` or `train.freeze`, by name."""

    trained: Mapping[str, FullTensor]
    frozen: Mapping[str, FullTensor]

    def lines(self) -> list[tuple[str, str]]:
        """Plan lines about trained and frozen parameters."""
        lines, total = [], len(self.trained) + len(self.frozen)
        for part, tensors in self._asdict().items():
            numel = sum(tensor.numel for tensor in tensors.values())
            names = patterns_of(list(tensors))
            lines.append((part, f"{len(tensors)} of {total} tensors, {numel:,} parameters: {names}"))
        return lines


def is_reached(name: str, family: Family, indexer: IndexerConfig | None) -> bool:
    """Whether a loss of the run reaches the parameter `name`. `indexer` says how indexers are trained; it is None if
    they are not trained.
    """
    if family.is_of_indexer(name):
        return indexer is not None
    return indexer is None or indexer.stage != "dense_warmup"


def plan_freezing(
    tensors: Mapping[str, FullTensor], *, only: Sequence[str], freeze: Sequence[str]
) -> FreezePlan | None:
    """Divide a model's `tensors` into trained and frozen parameters by the patterns of `train.only` and `train.freeze`;
    None if all are trained. ConfigError if a pattern matches no parameter.
    """
    if not (only or freeze):
        return None
    names = parameter_names(tensors)
    chosen, frozen = (
        {name for pattern in patterns for name in matching(pattern, names, key=key, what="parameter")}
        for key, patterns in (("train.only", only), ("train.freeze", freeze))
    )
    trained = {name: each for name, each in tensors.items() if name not in frozen and (not chosen or name in chosen)}
    return FreezePlan(trained, {name: each for name, each in tensors.items() if name not in trained})


@dataclass(frozen=True, eq=False)
class TrainedTensors:
    """Tensors of a model that a run trains, adapts or quantises, by full name."""

    full: Mapping[str, FullTensor]
    """Tensors that are trained in full."""
    saved: Mapping[str, FullTensor]
    """Tensors that checkpoints hold in full: those of `full`, frozen routers and untrained indexers."""
    rank: int = 0
    """LoRA rank of all adapters; 0 without adapters."""
    adapted: Mapping[str, FullTensor] = field(default_factory=dict)
    """Frozen weights that have adapters."""
    quantised: Mapping[str, FullTensor] = field(default_factory=dict)
    """Frozen weights that are held in four bits."""

    @property
    def num_saved(self) -> int:
        """Number of parameters in a checkpoint."""
        shapes = (shape for weight in self.adapted.values() for shape in self.adapter_shapes(weight.shape))
        return sum(tensor.numel for tensor in self.saved.values()) + sum(map(prod, shapes))

    def adapter_shapes(self, weight: Shape) -> tuple[Shape, Shape]:
        """Shapes of both tensors of the adapter of a weight of shape `weight`."""
        *experts, rows, columns = weight
        return (*experts, self.rank, columns), (*experts, self.rank, rows)


@lru_cache(maxsize=4096)
def trained_tensors(
    model: DescribedModel,
    patterns: tuple[tuple[str, ...], tuple[str, ...]],
    lora: LoraConfig | None,
    router: RouterConfig | None,
    indexer: IndexerConfig,
) -> TrainedTensors:
    """Decide which tensors of a model a run with these sections trains. `patterns` are those of `train.only` and of
    `train.freeze`. ConfigError if a pattern of the run file does not fit the model.
    """
    tensors = model.tensors.by_name
    if lora is not None:
        adaptable = targets_of(model.tensors)
        targets = adapted_targets(adaptable, lora)
        full = fully_trained_parameters(tensors, lora, targets)
        adapted, quantised = (_weights_of(each, tensors) for each in (targets, quantised_targets(adaptable, lora)))
        return TrainedTensors(full, full, lora.rank, adapted, quantised)
    freezing = plan_freezing(tensors, only=patterns[0], freeze=patterns[1])
    indexers = indexer if indexer.train else None
    saved = tensors if freezing is None else freezing.trained
    frozen = () if router is None or router.train else ("router",)
    reached = (name for name in saved if is_reached(name, model.family, indexers))
    return TrainedTensors({name: saved[name] for name in reached if part_of(name) not in frozen}, saved)


def _weights_of(targets: Iterable[LoraTarget], tensors: Mapping[str, FullTensor]) -> dict[str, FullTensor]:
    names = (f"{target.name}.{leaf}" for target in targets for leaf in target.shapes)
    return {name: tensors[name] for name in names}
