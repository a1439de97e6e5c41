"""Lists the tensors that a rank holds, for each pipeline stage, and counts their elements: trained, frozen, sharded by
ZeRO, and held in four bits.
"""

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod

from ds_finetune.config.sections import LoraConfig, ParallelConfig
from ds_finetune.families.family import layer_of
from ds_finetune.families.table import family_of
from ds_finetune.plan.layer_stages import stages_of
from ds_finetune.plan.lora_targets import (
    LoraTarget,
    adapted_targets,
    fully_trained_parameters,
    nf4_bytes,
    quantised_targets,
    targets_of,
)
from ds_finetune.plan.model_tensors import (
    EMBEDDING,
    DescribedModel,
    FullTensor,
    LayerKind,
    ModelTensors,
    part_of,
)
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.trained_parts import is_reached, plan_freezing


@dataclass(frozen=True)
class TensorKind:
    """Tensors of a pipeline stage with equal shapes, whose names differ only in the layer number. `name` has `N` for
    that number, `count` is the number of these tensors, and ZeRO shards each over `sharers` ranks.
    """

    name: str
    count: int
    full_shape: tuple[int, ...]
    local: tuple[int, ...]
    """Shape of a rank's shard under tensor and expert parallelism, before ZeRO shards it."""
    sharers: int
    names: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Full names of the tensors of this kind, in the model's order; adapters have the name of the weight they adapt."""

    def among(self, names: Container[str]) -> "TensorKind":
        """This kind with only those of its tensors whose full names are in `names`."""
        matches = tuple(name for name in self.names if name in names)
        return replace(self, count=len(matches), names=matches)

    @property
    def numel(self) -> int:
        """Number of elements of the tensors of this kind on a rank, before ZeRO shards them."""
        return self.count * prod(self.local)

    @property
    def sharded(self) -> int:
        """Number of elements of the tensors of this kind on a rank, after ZeRO shards them."""
        return self.count * -(-prod(self.local) // self.sharers)


@dataclass(frozen=True)
class RankWeights:
    """Tensors on a rank of one pipeline stage, before ZeRO shards them. All ranks of a stage hold equally many
    elements.
    """

    kinds: tuple[TensorKind, ...]
    layers: tuple[int, ...]
    """Indices of the layers of the pipeline stage."""
    layer_kinds: tuple[LayerKind, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements of all tensors on a rank, before ZeRO shards them."""
        return sum(kind.numel for kind in self.kinds)

    @property
    def sharded(self) -> int:
        """Number of elements of all tensors on a rank, after ZeRO shards them."""
        return sum(kind.sharded for kind in self.kinds)


@lru_cache(maxsize=4096)
def rank_weights(model: DescribedModel, parallel: ParallelConfig, *, zero_ranks: int) -> tuple[RankWeights, ...]:
    """For each pipeline stage, the tensors that one of its ranks holds, with ZeRO sharding over `zero_ranks` ranks.
    ConfigError if the model's layers cannot be assigned to the stages.
    """
    tensors = model.tensors
    stages = stages_of(tensors, parallel)
    ranks = []
    for number, given in enumerate(stages):
        layers = tuple(given if given is not None else range(len(tensors.layers)))
        counted = _stage_tensors(tensors, layers, is_first=number == 0, is_last=number == len(stages) - 1)
        kinds = []
        for (name, tensor), names in counted.items():
            sharers = zero_ranks // (parallel.ep if tensor.is_routed else 1)
            local = tensor.local(tp=parallel.tp, ep=parallel.ep)
            kinds.append(TensorKind(name, len(names), tensor.shape, local, sharers, tuple(names)))
        ranks.append(RankWeights(tuple(kinds), layers, tuple(tensors.layers[layer] for layer in layers)))
    return tuple(ranks)


def weights_of_run(plan: Plan, model: DescribedModel) -> tuple[RankWeights, ...]:
    """For each pipeline stage, the tensors that one of its ranks holds in the planned run."""
    return rank_weights(model, plan.parallel, zero_ranks=plan.zero_ranks)


def _stage_tensors(
    tensors: ModelTensors, layers: tuple[int, ...], *, is_first: bool, is_last: bool
) -> Mapping[tuple[str, FullTensor], list[str]]:
    """Map each kind of tensors of a pipeline stage to the full names of these tensors. A kind is a name (`N` for the
    layer number) and a FullTensor (shape and division). The last stage also has the embedding if the head is tied or
    there is a multi-token prediction layer.
    """
    predicts = any(tensors.layers[layer].is_prediction for layer in layers)
    has_embedding = is_first or (is_last and (tensors.is_tied or predicts))
    ends = tensors.ends.items()
    names_by_kind = {end: [end[0]] for end in ends if (has_embedding if end[0] == EMBEDDING else is_last)}
    names = list(tensors.layer_names.values())
    for layer in layers:
        kind = tensors.layers[layer]
        for name, own in zip(names[layer], kind.tensors, strict=True):
            names_by_kind.setdefault((f"{kind.stack}.N.{own[0]}", own[1]), []).append(name)
    return names_by_kind


@dataclass(frozen=True)
class RankElements:
    """Numbers of elements on a rank. Attributes whose names begin with `sharded_` count the rank's ZeRO shard, all
    others count unsharded tensors.
    """

    tensors: tuple[TensorKind, ...]
    """Kinds of all tensors on the rank, with adapters."""
    trains_embedding: bool
    weights: int
    """Elements of the weights in the run's precision, without 4-bit weights."""
    sharded_weights: int
    trained: int
    sharded_trained: int
    largest_group: int
    """Sharded elements that the optimizer updates at once. It updates two groups one after the other: experts divided
    by `parallel.ep`, and all other weights. This is the size of the larger group.
    """
    largest: int
    """Elements of the largest trained tensor."""
    packed_bytes: int = 0
    """Bytes of 4-bit weights, which ZeRO-3 shards."""
    scales_bytes: int = 0
    """Bytes of the scales of 4-bit weights, which every rank holds."""
    dequantised: int = 0
    """Elements of the largest 4-bit weight, which is dequantised to the run's precision while it is used."""


def rank_elements(plan: Plan, model: DescribedModel, weights: RankWeights) -> RankElements:
    """Count trained, frozen and 4-bit elements on a rank of one pipeline stage."""
    lora, adapters, quantised = plan.lora, tuple[TensorKind, ...](), list[tuple[int, ...]]()
    if lora is None:
        freezing = plan_freezing(plan.train, model.tensors.by_name)
        names = model.tensors.by_name if freezing is None else freezing.trained
        family, indexer = family_of(str(model["model_type"])), plan.indexer if plan.indexer.train else None
        freezes_routers = plan.router is not None and not plan.router.train
        kinds = [kind for kind in weights.kinds if is_reached(kind.name, family, indexer)]
        kinds = [kind.among(names) for kind in kinds if not (freezes_routers and part_of(kind.name) == "router")]
        trained = [kind for kind in kinds if kind.count]
    else:
        adapters = _adapter_kinds(model, lora, (plan.mesh.tp, plan.mesh.ep, plan.zero_ranks), weights.layers)
        others = fully_trained_parameters(model.tensors.by_name, lora, lora_targets(model, lora))
        trained = [*adapters, *(kind for each in weights.kinds if (kind := each.among(others)).count)]
        four_bit = quantised_targets(targets_of(model.tensors), lora)
        here = (target for target in four_bit if layer_of(f"{target.name}.") in weights.layers)
        quantised = [shape for target in here for shape in target.shapes.values()]
    shares, packed = Counter[int](), sum(map(prod, quantised))
    for kind in trained:
        shares[kind.sharers] += kind.sharded
    tensors = (*weights.kinds, *adapters)
    return RankElements(
        tensors=tensors,
        trains_embedding=any(kind.name == EMBEDDING for kind in trained),
        weights=sum(kind.numel for kind in tensors) - packed,
        sharded_weights=sum(kind.sharded for kind in tensors) - packed // plan.zero_ranks,
        trained=sum(kind.numel for kind in trained),
        sharded_trained=sum(shares.values()),
        largest_group=max(shares.values(), default=0),
        largest=max((kind.numel // kind.count for kind in trained), default=0),
        packed_bytes=packed // 2,
        scales_bytes=sum(map(nf4_bytes, quantised)) - packed // 2,
        dequantised=max(map(prod, quantised), default=0),
    )


@lru_cache(maxsize=4096)
def lora_targets(model: DescribedModel, lora: LoraConfig) -> tuple[LoraTarget, ...]:
    """The modules of a model that get LoRA adapters. ConfigError if a pattern of `lora.target_modules` does not fit the
    model.
    """
    return adapted_targets(targets_of(model.tensors), lora)


def count_adapters(plan: Plan, model: DescribedModel) -> int:
    """Number of trained parameters of a run with LoRA: adapters, and parameters that are trained in full."""
    assert plan.lora is not None
    targets, tensors = lora_targets(model, plan.lora), model.tensors.by_name
    others = sum(tensors[name].numel for name in fully_trained_parameters(tensors, plan.lora, targets))
    return others + sum(target.num_params(plan.lora.rank) for target in targets)


@lru_cache(maxsize=4096)
def _adapter_kinds(
    model: DescribedModel, lora: LoraConfig, sizes: tuple[int, int, int], layers: tuple[int, ...]
) -> tuple[TensorKind, ...]:
    """Kinds of LoRA tensors on a rank that holds the layers `layers`. `sizes` has the tensor parallel size, the expert
    parallel size, and the number of ranks over which ZeRO shards.
    """
    tp, ep, zero_ranks = sizes
    names_by_kind: dict[TensorKind, list[str]] = {}
    for target in lora_targets(model, lora):
        for leaf in target.shapes if layer_of(f"{target.name}.") in layers else ():
            weight = model.tensors.by_name[f"{target.name}.{leaf}"]
            local = weight.local(tp=tp, ep=ep)
            for side in (-1, -2):
                full, own = ((*shape[:-2], lora.rank, shape[side]) for shape in (weight.shape, local))
                # Expert parallelism divides experts over ep ranks already, so ZeRO shards an expert over fewer ranks.
                kind = TensorKind(leaf, 0, full, own, zero_ranks // (ep if weight.is_routed else 1))
                names_by_kind.setdefault(kind, []).append(f"{target.name}.{leaf}")
    return tuple(replace(kind, count=len(names), names=tuple(names)) for kind, names in names_by_kind.items())
