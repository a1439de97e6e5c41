"""How many numbers a rank holds, trains and updates: all weights, or adapters beside weights that stay."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ds_finetune.config.sections import LoraConfig
from ds_finetune.families.family import layer_of
from ds_finetune.families.parameters import ModelConfig
from ds_finetune.families.table import family_of
from ds_finetune.families.tensors import model_tensors
from ds_finetune.plan.estimate.config_text import config_text
from ds_finetune.plan.estimate.rank_weights import RankWeights, part_of
from ds_finetune.plan.estimate.states import TensorKind
from ds_finetune.plan.lora_targets import adapted_targets, nf4_bytes, quantised_targets, targets_among
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.tensor_cuts import local_shape


@dataclass(frozen=True)
class RankElements:
    """Numbers of a rank: whole, and the share of it that ZeRO gives each rank."""

    held: int
    """All weights, in the run's precision; those in four bits are not among them."""
    held_share: int
    trained: int
    trained_share: int
    group_share: int
    """The share of the larger group: experts that `parallel.ep` divides and other weights are updated by turns."""
    largest: int
    """The largest tensor that is trained."""
    packed_bytes: int = 0
    """Bytes of weights in four bits, of which each rank has a share at ZeRO-3."""
    scales_bytes: int = 0
    """Bytes of their scales, which every rank has."""
    dequantised: int = 0
    """Elements of the largest weight in four bits, which is one in the run's precision while it is used."""


def rank_elements(plan: Plan, model: ModelConfig, weights: RankWeights) -> RankElements:
    """The numbers of a rank of one pipeline stage."""
    held, share = weights.numel, sum(kind.sharded for kind in weights.kinds)
    if plan.lora is not None:
        return _with_adapters(plan, model, weights)
    trained = [kind for kind in weights.kinds if is_trained(plan, model, kind)]
    return RankElements(
        held=held,
        held_share=share,
        trained=sum(kind.numel for kind in trained),
        trained_share=sum(kind.sharded for kind in trained),
        group_share=_group_share(trained),
        largest=max((kind.numel // kind.count for kind in trained), default=0),
    )


def _group_share(trained: list[TensorKind]) -> int:
    """Elements of this rank's share of the larger group of weights, by the number of ranks that share them."""
    shares: Counter[int] = Counter()
    for kind in trained:
        shares[kind.sharers] += kind.sharded
    return max(shares.values(), default=0)


def count_adapters(plan: Plan, model: ModelConfig) -> int:
    """Parameters of all adapters of a run with LoRA, and of a score head."""
    assert plan.lora is not None
    text, scores = config_text(model), plan.objective.num_outputs
    mtp_layers = 1 if plan.mtp.train else 0
    layers = tuple(range(model["num_hidden_layers"] + mtp_layers))
    adapters = _adapters(text, plan.lora.model_dump_json(), (1, 1, mtp_layers, scores), layers)
    return adapters.numel + scores * int(model["hidden_size"])


def is_trained(plan: Plan, model: ModelConfig, kind: TensorKind) -> bool:
    """Whether a run without LoRA trains a tensor: indexers are trained by a loss of their own, routers unless the run
    file says otherwise.
    """
    part = part_of(kind.name)
    if family_of(str(model["model_type"])).indexer is not None and plan.indexer.train:
        if plan.indexer.stage == "dense_warmup":
            return part == "indexer"
    elif part == "indexer":
        return False
    return part != "router" or plan.router is None or plan.router.train


def _with_adapters(plan: Plan, model: ModelConfig, weights: RankWeights) -> RankElements:
    assert plan.lora is not None
    text = config_text(model)
    sizes = (plan.mesh.tp, plan.mesh.ep, 1 if plan.mtp.train else 0, plan.objective.num_outputs)
    adapters = _adapters(text, plan.lora.model_dump_json(), sizes, weights.layers)
    score = sum(kind.numel for kind in weights.kinds if kind.name.startswith("score."))
    numel, share = weights.numel - adapters.quantised, sum(kind.sharded for kind in weights.kinds)
    trained = adapters.numel + score
    trained_share = -(-adapters.numel // plan.zero_ranks) + -(-score // plan.zero_ranks)
    return RankElements(
        held=numel + adapters.numel,
        held_share=share - adapters.quantised // plan.zero_ranks + -(-adapters.numel // plan.zero_ranks),
        trained=trained,
        trained_share=trained_share,
        group_share=trained_share,
        largest=adapters.largest,
        packed_bytes=adapters.quantised // 2,
        scales_bytes=adapters.quantised_bytes - adapters.quantised // 2,
        dequantised=adapters.largest_quantised,
    )


@dataclass(frozen=True)
class _AdapterElements:
    numel: int
    largest: int
    quantised: int
    quantised_bytes: int
    largest_quantised: int


@lru_cache(maxsize=1024)
def _adapters(model: str, lora: str, sizes: tuple[int, int, int, int], layers: tuple[int, ...]) -> _AdapterElements:
    """The adapters and weights in four bits of these layers on a rank; `sizes` are tp, ep, prediction layers and
    scores.
    """
    tp, ep, mtp_layers, scores = sizes
    section, tree = LoraConfig.model_validate_json(lora), json.loads(model)
    every = targets_among(model_tensors(tree, mtp_layers=mtp_layers, scores=scores).named())
    is_transposed = family_of(tree["model_type"]).transposed_experts
    found: list[int] = []
    quantised = [
        shape
        for target in quantised_targets(every, section)
        if layer_of(f"{target.name}.") in layers
        for shape in target.shapes.values()
    ]
    for target in adapted_targets(every, section):
        for leaf, shape in target.shapes.items() if layer_of(f"{target.name}.") in layers else ():
            local = local_shape(f"{target.name}.{leaf}", shape, tp=tp, ep=ep, has_transposed_experts=is_transposed)
            found += [prod(local[:-2]) * section.rank * side for side in local[-2:]]
    return _AdapterElements(
        numel=sum(found),
        largest=max(found, default=0),
        quantised=sum(map(prod, quantised)),
        quantised_bytes=sum(map(nf4_bytes, quantised)),
        largest_quantised=max(map(prod, quantised), default=0),
    )
