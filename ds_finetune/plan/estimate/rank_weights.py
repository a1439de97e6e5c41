"""The tensors that a rank of each pipeline stage holds, computed from config.json; `trainer/rank_tensors.py` can
read the same off a model, and tests/plan/estimate/test_rank_weights.py compares them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ds_finetune.config.parallel import ParallelConfig
from ds_finetune.families.parameters import ModelConfig
from ds_finetune.families.table import family_of
from ds_finetune.families.tensors import EMBEDDING, FINAL_NORM, HEAD, SCORE_HEAD, LayerKind, ModelTensors, model_tensors
from ds_finetune.plan.estimate.config_text import config_text
from ds_finetune.plan.estimate.states import TensorKind
from ds_finetune.plan.layer_stages import stages_of
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.tensor_cuts import fused_experts_part, local_shape

_PARTS = (
    ("indexer", re.compile(r"\.self_attn\.indexer\.")),
    ("attention", re.compile(r"\.self_attn\.\w+_proj(_with_mqa)?\.|\.self_attn\.sinks$")),
    ("routed experts", re.compile(r"\.mlp\.experts\.")),
    ("shared experts", re.compile(r"\.mlp\.shared_experts\.")),
    ("router", re.compile(r"\.mlp\.(gate|router)\.")),
    ("dense MLP", re.compile(r"\.mlp\.\w+_proj\.")),
    ("multi-token prediction", re.compile(r"\.eh_proj\.")),
    ("norms", re.compile(r"norm")),
    ("embedding", re.compile(r"embed_tokens")),
    ("head", re.compile(r"^(lm_head|score)\.")),
)


@lru_cache(maxsize=4096)
def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to, by its full name: attention, dense MLP, routed experts, ..."""
    return next(part for part, pattern in _PARTS if pattern.search(name))


@dataclass(frozen=True)
class RankWeights:
    """What a rank of one pipeline stage holds before ZeRO shards it; the other ranks of the stage hold as much."""

    kinds: tuple[TensorKind, ...]
    layers: tuple[int, ...]
    """Numbers of its layers."""
    layer_kinds: tuple[LayerKind, ...]
    """The kind of each of them."""

    @cached_property
    def numel(self) -> int:
        """Elements of a rank."""
        return sum(kind.numel for kind in self.kinds)


def rank_weights(
    model: ModelConfig, parallel: ParallelConfig, *, zero_ranks: int, mtp_layers: int = 0, scores: int = 0
) -> tuple[RankWeights, ...]:
    """What a rank of each pipeline stage holds of the model whose config.json is given, where ZeRO shards over
    `zero_ranks`. ConfigError as `model_tensors` and `stages_of`.
    """
    text = config_text(model)
    return _rank_weights(text, parallel.model_dump_json(), zero_ranks, mtp_layers, scores)


def weights_of_run(plan: Plan, model: ModelConfig) -> tuple[RankWeights, ...]:
    """`rank_weights` of a run; the number of classes is assumed to be 2 where the run file does not have it."""
    return rank_weights(
        model,
        plan.parallel,
        zero_ranks=plan.zero_ranks,
        mtp_layers=1 if plan.mtp.train else 0,
        scores=plan.objective.num_outputs,
    )


@lru_cache(maxsize=1024)
def _rank_weights(model: str, parallel: str, zero_ranks: int, mtp_layers: int, scores: int) -> tuple[RankWeights, ...]:
    tensors = _model_tensors(model, mtp_layers, scores)
    sizes = ParallelConfig.model_validate_json(parallel)
    is_transposed = family_of(json.loads(model)["model_type"]).transposed_experts
    stages = stages_of(tensors, sizes)
    found = []
    for number, given in enumerate(stages):
        layers = tuple(given if given is not None else range(len(tensors.layers)))
        counted = _stage_tensors(tensors, layers, is_first=number == 0, is_last=number == len(stages) - 1)
        kinds = []
        for (name, whole), count in counted.items():
            local = local_shape(name, whole, tp=sizes.tp, ep=sizes.ep, has_transposed_experts=is_transposed)
            is_cut = fused_experts_part(name) is not None and sizes.ep > 1
            kinds.append(TensorKind(name, count, whole, local, zero_ranks // (sizes.ep if is_cut else 1)))
        layer_kinds = tuple(tensors.layers[layer] for layer in layers)
        found.append(RankWeights(tuple(kinds), layers, layer_kinds))
    return tuple(found)


@lru_cache(maxsize=64)
def _model_tensors(model: str, mtp_layers: int, scores: int) -> ModelTensors:
    return model_tensors(json.loads(model), mtp_layers=mtp_layers, scores=scores)


def _stage_tensors(
    tensors: ModelTensors, layers: tuple[int, ...], *, is_first: bool, is_last: bool
) -> Mapping[tuple[str, tuple[int, ...]], int]:
    """Number of tensors of a stage by name and whole shape."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for name, shape in _ends(tensors, layers, is_first=is_first, is_last=is_last):
        counts[name, shape] += 1
    for kind, number in Counter(tensors.layers[layer] for layer in layers).items():
        for name, shape in tensors.of_kind[kind].items():
            counts[f"model.layers.N.{name}", shape] += number
    return counts


def _ends(
    tensors: ModelTensors, layers: tuple[int, ...], *, is_first: bool, is_last: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors outside of layers of a stage; the last one has the embedding too for a tied head or a prediction
    layer.
    """
    predicts = any(tensors.layers[layer].is_prediction for layer in layers)
    if is_first or (is_last and (tensors.is_tied or predicts)):
        yield EMBEDDING, tensors.ends[EMBEDDING]
    if is_last:
        for name in (FINAL_NORM, HEAD, SCORE_HEAD):
            if name in tensors.ends:
                yield name, tensors.ends[name]
