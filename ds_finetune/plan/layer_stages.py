"""Assigns layers to pipeline stages, and lists the tensors that a rank of each stage holds."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.family import layer_of
from ds_finetune.plan.model_tensors import EMBEDDING, DescribedModel, FullTensor, ModelTensors


@dataclass(frozen=True)
class StageLayers:
    """Layers of a pipeline rank: a range of consecutive layers for each of its model chunks, in the model's order."""

    chunks: tuple[range, ...]

    def __contains__(self, layer: object) -> bool:
        return any(layer in chunk for chunk in self.chunks)

    def __iter__(self) -> Iterator[int]:
        return (layer for chunk in self.chunks for layer in chunk)

    def __str__(self) -> str:
        """Layer indices as `0 to 3`, or `0 to 1 and 4 to 5` for two chunks."""
        return " and ".join(f"{chunk[0]} to {chunk[-1]}" for chunk in self.chunks)


def check_trained_stages(
    trained: Mapping[str, FullTensor], stages: Sequence[StageLayers | None], *, ep_size: int, given: str
) -> None:
    """ConfigError where a pipeline stage lacks a kind of `trained` tensors that another stage has.

    Kinds are vectors (norms and biases) and matrices; with `ep_size` > 1 those of routed experts are separate kinds.
    `given` names the run-file keys that chose the tensors. DeepSpeed 0.19.8 needs a trained parameter on every rank and
    sums norms over stages for each parameter group (zero/stage_1_and_2.py:2951), so ranks with different groups hang.
    """
    kinds = [set[str]() for _ in stages]
    for name, tensor in trained.items():
        layer = layer_of(name)
        holders = [n for n, layers in enumerate(stages) if layers is None or layer in layers]
        kind = "vectors" if len(tensor.shape) == 1 or name.endswith("bias") else "matrices"
        kind = f"routed experts' {kind}" if tensor.is_routed and ep_size > 1 else kind
        kinds[holders[0] if holders else 0 if name == EMBEDDING else -1].add(kind)
    for number, (layers, own_kinds) in enumerate(zip(stages, kinds, strict=True)):
        missing = sorted(set.union(*kinds) - own_kinds)
        if missing and layers is not None:
            raise ConfigError(
                f"{given} selects no {missing[0]} in stage {number} of parallel.pp {len(stages)} (layers {layers}), "
                "but some in another stage",
                hint=f"select {missing[0]} in every stage or in none, or set parallel.pp: 1",
            )


def stages_of(tensors: ModelTensors, parallel: ParallelConfig) -> tuple[StageLayers | None, ...]:
    """Layers of each pipeline rank, by `pp_layers` or balanced by parameters; a single None without pipeline
    parallelism. Multi-token prediction layers are in the last chunk.

    The model is cut into pp x vpp chunks of consecutive layers, and rank r holds the chunks r, r + pp, r + 2 pp and so
    on (Narayanan et al., arXiv 2104.04473, section 2.2).

    ConfigError where a stage has no routed experts under expert parallelism: DeepSpeed 0.19.8 sums norms over stages
    for each group of parameters (zero/stage_1_and_2.py:2951), and all stages must have the same number of groups.
    """
    if parallel.pp == 1:
        return (None,)
    if parallel.pp_layers:
        chunks = [range(first, last) for first, last in pairwise(accumulate(parallel.pp_layers, initial=0))]
    else:
        chunks = [*balance_layers(tuple(_layer_parameters(tensors, parallel.ep)), parallel.pp * parallel.vpp)]
    chunks[-1] = range(chunks[-1].start, len(tensors.layers))
    stages = tuple(StageLayers(tuple(chunks[rank :: parallel.pp])) for rank in range(parallel.pp))
    have_experts = {number for number, kind in enumerate(tensors.layers) if kind.is_sparse}
    for stage, layers in enumerate(stages):
        if parallel.ep > 1 and not have_experts & set(layers):
            raise ConfigError(
                f"parallel.ep {parallel.ep} needs routed experts in each pipeline stage, but stage {stage} of "
                f"parallel.pp {parallel.pp} (layers {layers}) has none",
                hint=f"layers {min(have_experts)} to {max(have_experts)} have experts; set parallel.pp_layers, or a "
                "smaller parallel.pp",
            )
    return stages


@lru_cache(maxsize=256)
def balance_layers(weights: tuple[int, ...], stages: int) -> tuple[range, ...]:
    """Split layers into `stages` ranges of at least one layer. The split minimises the largest sum of `weights` of a
    range; among equally good splits, it minimises the sum of the squares of these sums.
    """
    ends = (0, *_best_splits(weights, stages)[len(weights)][2])
    return tuple(range(first, last) for first, last in pairwise(ends))


_Split = tuple[int, int, tuple[int, ...]]
"""A division of layers into parts: (weight of the heaviest part, sum of the parts' squared weights, end index of each
part). The weight of a part is the sum of its layers' weights. The smaller of two divisions is the more even one.
"""


@lru_cache(maxsize=1024)
def _best_splits(weights: tuple[int, ...], parts: int) -> Mapping[int, _Split]:
    """Map each `end` to the best split of the first `end` layers into `parts`; ends below `parts` are missing."""
    sums = (0, *accumulate(weights))
    if parts == 1:
        return {end: (sums[end], sums[end] ** 2, (end,)) for end in range(1, len(sums))}
    shorter, best = _best_splits(weights, parts - 1), dict[int, _Split]()
    for end in range(parts, len(sums)):
        for begin in range(end - 1, parts - 2, -1):
            last = sums[end] - sums[begin]
            if end in best and last > best[end][0]:
                # The last part alone has more weight than each part of the best split so far, and grows as begin falls.
                break
            largest, squares, ends = shorter[begin]
            split = (max(largest, last), squares + last**2, (*ends, end))
            best[end] = min(best.get(end, split), split)
    return best


def _layer_parameters(tensors: ModelTensors, ep_size: int) -> list[int]:
    """Parameters per rank of each layer, for balancing stages.

    The first layer's number includes the embedding. The last layer's includes norm, head and multi-token prediction
    layers; a tied head adds the embedding's parameters to it, and prediction layers add them once more.
    """
    sizes = [
        sum(tensor.numel // (ep_size if tensor.is_routed else 1) for _, tensor in kind.tensors)
        for kind in tensors.layers
    ]
    number, embedding = len(sizes) - tensors.num_predictions, tensors.ends[EMBEDDING].numel
    counts, predictions = sizes[:number], sizes[number:]
    counts[0] += embedding
    counts[-1] += sum(predictions) + embedding * (bool(predictions) + tensors.is_tied)
    counts[-1] += sum(tensor.numel for name, tensor in tensors.ends.items() if name != EMBEDDING)
    return counts


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
    predictions: tuple[int, ...]
    """Indices of those of these layers that predict tokens after the next one."""

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
        predictions = tuple(layer for layer in layers if tensors.layers[layer].is_prediction)
        ranks.append(RankWeights(tuple(kinds), layers, predictions))
    return tuple(ranks)


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
