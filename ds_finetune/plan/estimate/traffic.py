"""What a rank sends in an optimizer step, by arithmetic: bytes and messages of each collective of a layout.

Bytes are counted as the metrics `comm/KIND_mib` count them (engine/groups/communication.py): those of rings and
pairs. tests/plan/estimate/test_traffic.py compares them with what a step sends in each layout. Some hundred bytes of a
step are left out: counts, sums of losses and norms.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ds_finetune.families.parameters import ModelConfig, window_of
from ds_finetune.families.table import family_of
from ds_finetune.families.tensors import EMBEDDING
from ds_finetune.plan.estimate.activation_memory import weighted_bytes
from ds_finetune.plan.estimate.compressed_layers import streams_of
from ds_finetune.plan.estimate.operations import Work, adapter_elements, adapter_parts, is_quantised
from ds_finetune.plan.estimate.rank_weights import RankWeights, is_trained, part_of
from ds_finetune.plan.estimate.states import TensorKind
from ds_finetune.plan.forward import head_widths
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.tested_layouts import WEIGHT_BYTES

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
Beside = Literal["", "computation", "shared experts"]
_WIDE, _INDEX = 4, 8
_FIRST_PARTITIONED = 3
_BUCKET = 500_000_000
"""Elements of a bucket of gradients or weights, DeepSpeed 0.19.8's default."""
_PERSISTENT = 100_000
"""Elements below which ZeRO-3 keeps a parameter whole, DeepSpeed 0.19.8's default."""
_REUSED = 1_000_000_000
"""Elements that are used between two uses of a parameter, for which ZeRO-3 keeps it gathered; the default too."""


class Group(NamedTuple):
    """Ranks that differ only in some axes: `size` ranks, `stride` apart."""

    size: int
    stride: int

    def on_node(self, ranks_per_node: int) -> int:
        """How many of its ranks are on the node of one of them."""
        return max(1, min(self.size, ranks_per_node // self.stride))


@dataclass(frozen=True)
class GroupTraffic:
    """What a rank sends in a step by one kind of collective for one purpose."""

    name: str
    kind: Kind
    group: Group
    num_bytes: float
    num_messages: float
    is_each_forward: bool
    """Whether it belongs to micro-batches; else it is done once at the end of a step."""
    beside: Beside = ""
    """What is computed meanwhile; empty where ranks wait for it."""


class RankGroups(NamedTuple):
    """The groups of a rank."""

    zero: Group
    """With one part of the model: gradients are averaged over it, and states sharded."""
    same_experts: Group
    experts: Group
    tensor: Group
    sequence: Group
    stages: Group

    @classmethod
    def of(cls, mesh: Mesh) -> "RankGroups":
        """The groups of `mesh`, whose ranks are numbered along pp, dp, sp and tp, the last one fastest."""
        ranks = mesh.dp * mesh.sp
        return cls(
            zero=Group(ranks, mesh.tp),
            same_experts=Group(ranks // mesh.ep, mesh.tp * mesh.ep),
            experts=Group(mesh.ep, mesh.tp),
            tensor=Group(mesh.tp, 1),
            sequence=Group(mesh.sp, mesh.tp),
            stages=Group(mesh.pp, ranks * mesh.tp),
        )


def traffic(work: Work, weights: RankWeights, *, stage: int) -> tuple[GroupTraffic, ...]:
    """What a rank of a pipeline stage sends in a step; nothing of no bytes."""
    parts = (_zero(work, weights), _tensor(work, weights, stage), _sequence(work, weights), _experts(work, weights))
    found = (transfer for part in (*parts, _pipeline(work, weights, stage)) for transfer in part)
    return tuple(transfer for transfer in found if transfer.num_bytes)


def _times(kind: Kind, group: Group, whole: float) -> float:
    """Bytes that a rank sends of a tensor of `whole` bytes."""
    share = (group.size - 1) / group.size
    return whole * share * (2 if kind == "all_reduce" else 1)


def _zero(work: Work, weights: RankWeights) -> Iterator[GroupTraffic]:
    """Gradients and weights over the ranks that have the same part of the model."""
    groups, lora = RankGroups.of(work.plan.mesh), work.plan.lora
    for group, has_experts in ((groups.zero, False), (groups.same_experts, True)):
        kinds = [kind for kind in weights.kinds if _is_cut(work, kind) == has_experts]
        trained = [kind for kind in kinds if lora is None and is_trained(work.plan, work.model, kind)]
        num_trained = sum(kind.numel for kind in trained) + sum(adapter_elements(lora, kind) for kind in kinds)
        yield from _reductions(work, group, num_trained)
        if work.plan.zero_stage >= _FIRST_PARTITIONED:
            yield from _gathers(work, group, kinds)
        elif work.plan.zero_stage:
            updated = _times("all_gather", group, work.width * num_trained)
            yield GroupTraffic("updated weights", "all_gather", group, updated, math.ceil(num_trained / _BUCKET), False)


def _is_cut(work: Work, kind: TensorKind) -> bool:
    return work.plan.mesh.ep > 1 and part_of(kind.name) == "routed experts"


def _reductions(work: Work, group: Group, numel: float) -> Iterator[GroupTraffic]:
    """DeepSpeed 0.19.8 sums gradients by all-reduce below ZeRO-3, also where each rank keeps a shard of them."""
    plan = work.plan
    width = WEIGHT_BYTES.get(str(plan.deepspeed_config.get("communication_data_type")), work.width)
    once = plan.zero_stage < 2 or plan.reduces_once or plan.mesh.pp > 1
    times = 1 if once else plan.batch.gradient_accumulation_steps
    kind: Kind = "reduce_scatter" if plan.zero_stage >= _FIRST_PARTITIONED else "all_reduce"
    zero: dict[str, Any] = plan.zero
    hides = bool(zero.get("overlap_comm", plan.zero_stage >= _FIRST_PARTITIONED))
    messages = times * math.ceil(numel / zero.get("reduce_bucket_size", _BUCKET))
    num_bytes = times * _times(kind, group, width * numel)
    beside: Beside = "computation" if hides else ""
    yield GroupTraffic("gradients", kind, group, num_bytes, messages, not once, beside)


class _Tensor(NamedTuple):
    """A tensor as ZeRO-3 partitions it, with the bytes of a number."""

    numel: int
    width: int

    @property
    def size(self) -> int:
        return self.numel * self.width


def _gathers(work: Work, group: Group, kinds: list[TensorKind]) -> Iterator[GroupTraffic]:
    """ZeRO-3 gathers weights in forward, and again in backward where too many others were used between.

    Small ones stay whole, and are gathered once after the optimizer's step, trained or not.
    """
    zero, plan = work.plan.zero, work.plan
    tensors = Counter[_Tensor]()
    for kind in kinds:
        whole = _Tensor(math.prod(kind.local), work.width)
        # Of four bits, two numbers are in a byte.
        is_packed = is_quantised(work.plan.lora, part_of(kind.name))
        tensors[_Tensor(-(-whole.numel // 2), 1) if is_packed else whole] += kind.count
        for part in adapter_parts(work.plan.lora, kind):
            tensors[_Tensor(part.numel, work.width)] += kind.count
    threshold = zero.get("stage3_param_persistence_threshold", _PERSISTENT)
    kept = [(each, count) for each, count in tensors.items() if each.numel <= threshold]
    fetched = [(each, count) for each, count in tensors.items() if each.numel > threshold]
    num_fetched, fetched_bytes = sum(count for _, count in fetched), sum(each.size * count for each, count in fetched)
    gathered = sum(each.numel * count for each, count in fetched)
    near = min(zero.get("stage3_max_reuse_distance", _REUSED), zero.get("stage3_max_live_parameters", _REUSED))
    # The distance between both uses of a weight is twice the weights of all later layers.
    again = max(0.0, gathered - near / 2)
    times = plan.batch.gradient_accumulation_steps
    # With hpZ (ZeRO++, arXiv 2306.10209) backward gathers from a second copy, which nearby ranks hold together.
    nearby = group._replace(size=min(group.size, zero.get("zero_hpz_partition_size", 1)))
    for name, source, share in (
        ("gathered weights", group, 1.0),
        ("weights gathered again", nearby if nearby.size > 1 else group, again / max(gathered, 1)),
    ):
        num_bytes = times * _times("all_gather", source, share * fetched_bytes)
        yield GroupTraffic(name, "all_gather", source, num_bytes, times * num_fetched * share, True, "computation")
    updated = _times("all_gather", group, sum(each.size * count for each, count in kept))
    yield GroupTraffic("updated weights", "all_gather", group, updated, 1, False)


def _tensor(work: Work, weights: RankWeights, stage: int) -> Iterator[GroupTraffic]:
    """Sums of activations and of their gradients over tensor parallel ranks."""
    mesh, layers = work.plan.mesh, len(weights.layers)
    if mesh.tp == 1:
        return
    group, times = RankGroups.of(mesh).tensor, work.plan.batch.gradient_accumulation_steps
    hidden = work.model["hidden_size"]
    # Recomputation of a layer ends before its last sum.
    sums = (2 + work.plan.recomputes) * layers + (stage == 0)
    columns = hidden * sums + _copied_columns(work, weights)
    if stage == 0 and work.plan.lora is not None and work.model.get("kv_lora_rank") is None:
        # Embeddings are frozen, and so need no gradient.
        columns -= hidden
    num_bytes = times * _times("all_reduce", group, work.width * columns * work.num_tokens)
    yield GroupTraffic("activations over tp", "all_reduce", group, num_bytes, times * (sums + 2 * layers), True)
    parts = [(kind.count, part) for kind in weights.kinds for part in adapter_parts(work.plan.lora, kind)]
    shared = sum(count * part.numel for count, part in parts if part.is_whole)
    # Of parts of adapters that all ranks have, each computes a part of the gradient (model/adapters/lora.py).
    num_bytes, messages = times * _times("all_reduce", group, work.width * shared), times * len(parts) / 2
    yield GroupTraffic("adapters over tp", "all_reduce", group, num_bytes, messages, True)
    if stage == mesh.pp - 1:
        # The gradient of the head's input; maximum, sum and logit of each label, and which token is likeliest.
        each = work.width * hidden + 3 * _WIDE + 2 * _INDEX
        num_bytes = times * _times("all_reduce", group, each * work.num_supervised)
        yield GroupTraffic("head over tp", "all_reduce", group, num_bytes, 4 * times, True)


def _copied_columns(work: Work, weights: RankWeights) -> float:
    """Columns whose gradients are summed over tensor parallel ranks, over all layers of a stage."""
    model, hidden = work.model, work.model["hidden_size"]
    attention = hidden
    if model.get("kv_lora_rank") is not None:
        attention = (model.get("q_lora_rank") or hidden) + model["kv_lora_rank"] + model["qk_rope_head_dim"]
    elif family_of(str(model["model_type"])).compresses:
        # What all heads read: low-rank queries, tokens and at most as many entries.
        attention = model["q_lora_rank"] + 2 * model["head_dim"]
    columns = 0.0
    for layer in weights.layer_kinds:
        columns += attention + hidden
        if layer.is_sparse:
            # The weights of chosen experts, and the input of shared experts.
            columns += work.experts_per_token + (hidden if _has_shared_experts(weights) else 0)
    return columns


def _has_shared_experts(weights: RankWeights) -> bool:
    return any(part_of(kind.name) == "shared experts" for kind in weights.kinds)


def _sequence(work: Work, weights: RankWeights) -> Iterator[GroupTraffic]:
    """Queries, keys and values to the ranks of their heads, and outputs back."""
    mesh = work.plan.mesh
    if mesh.sp == 1:
        return
    group, times = RankGroups.of(mesh).sequence, work.plan.batch.gradient_accumulation_steps
    passes = 2 + work.plan.recomputes
    if family_of(str(work.model["model_type"])).compresses:
        # Every rank gets the last tokens of all others, and the entries of all.
        columns = sum(_gathered_columns(work, layer) for layer in weights.layers)
        num_bytes = times * passes * _times("all_gather", group, work.width * columns * mesh.sp)
        yield GroupTraffic(
            "attention over sp", "all_gather", group, num_bytes, 3 * times * passes * len(weights.layers), True
        )
        return
    columns = _exchanged_columns(work.model, mesh) * len(weights.layers)
    num_bytes = times * passes * _times("all_to_all", group, work.width * columns * work.num_tokens)
    messages = times * passes * 2 * len(weights.layers)
    yield GroupTraffic("attention over sp", "all_to_all", group, num_bytes, messages, True)


def _gathered_columns(work: Work, layer: int) -> float:
    """Numbers of a rank that the attention of a layer of DeepSeek-V4 gathers: tokens of a window, what a compressor
    makes entries of, and these.
    """
    rules, model = family_of(str(work.model["model_type"])).parameters, work.model
    assert rules is not None
    window = window_of(model, rules.type_of(model, layer))
    near = min(work.num_tokens, work.num_rows * (int(model["sliding_window"]) - 1))
    if window is None:
        return float(model["head_dim"] * near)
    before = min(work.num_tokens, work.num_rows * (window.series * window.tokens - 1))
    return float(model["head_dim"] * (near + 2 * window.series * before + work.num_tokens / window.tokens))


def _exchanged_columns(model: ModelConfig, mesh: Mesh) -> int:
    """Columns of queries, keys, values and outputs of a layer; grouped keys are repeated until ranks divide them."""
    heads = model["num_attention_heads"] // mesh.tp
    width, value = head_widths(model)
    if model.get("kv_lora_rank") is not None:
        return int(heads * 2 * (width + value))
    groups = (model.get("num_key_value_heads") or model["num_attention_heads"]) // mesh.tp
    groups *= mesh.sp // math.gcd(groups, mesh.sp)
    return int(2 * width * (heads + groups))


def _experts(work: Work, weights: RankWeights) -> Iterator[GroupTraffic]:
    """Rows to the ranks of their experts and back, in both passes; tokens are divided evenly over experts."""
    mesh, sparse = work.plan.mesh, sum(layer.is_sparse for layer in weights.layer_kinds)
    if mesh.ep == 1 or not sparse:
        return
    group, times = RankGroups.of(mesh).experts, work.plan.batch.gradient_accumulation_steps
    keys = family_of(str(work.model["model_type"])).expert_keys
    assert keys is not None, work.model["model_type"]
    forwards = 1 + work.plan.recomputes_kept
    # A token's row is sent once for each of its experts, also to several of one rank or one node.
    sent = work.num_tokens * work.experts_per_token
    rows, routing = sent * work.model["hidden_size"] * work.width, sent * weighted_bytes(work.model, work.width)
    there = times * sparse * _times("all_to_all", group, (forwards + 1) * (rows + routing))
    # Recomputation of a layer ends before rows go back.
    back = times * sparse * _times("all_to_all", group, 2 * rows)
    counts = times * sparse * _times("all_to_all", group, forwards * keys.number(work.model) * _INDEX)
    # Shared experts are computed while rows, or gradients of rows, are on their way to or from experts; ranks wait for
    # the other way (model/parallel/expert.py).
    messages = times * sparse * 2 * (forwards + 1)
    beside: Beside = "shared experts" if _has_shared_experts(weights) else ""
    yield GroupTraffic("rows over ep", "all_to_all", group, there, messages, True, beside)
    messages = times * sparse * (2 + forwards)
    yield GroupTraffic("rows over ep", "all_to_all", group, back + counts, messages, True)


def between_chunks(work: Work) -> GroupTraffic:
    """Hidden states of all forwards of a step from a chunk of layers to the next one, or their gradients back."""
    times, stages = work.plan.batch.gradient_accumulation_steps, RankGroups.of(work.plan.mesh).stages
    num_bytes = times * work.num_tokens * streams_of(work.model) * work.model["hidden_size"] * work.width
    return GroupTraffic("hidden states over pp", "send_recv", stages, num_bytes, times, True)


def _pipeline(work: Work, weights: RankWeights, stage: int) -> Iterator[GroupTraffic]:
    """Hidden states to the next stage and their gradients to the one before."""
    mesh = work.plan.mesh
    if mesh.pp == 1:
        return
    one = between_chunks(work)
    # Every chunk of a rank but the model's first and last one has two neighbours.
    neighbours = 2 * work.plan.parallel.vpp - (stage == 0) - (stage == mesh.pp - 1)
    yield replace(one, num_bytes=neighbours * one.num_bytes, num_messages=neighbours * one.num_messages)
    shared = [kind for kind in weights.kinds if kind.name == EMBEDDING]
    if stage in (0, mesh.pp - 1) and shared and _has_tied_ends(work) and work.plan.lora is None:
        ends = Group(2 * mesh.dp * mesh.sp, 1)
        num_bytes = _times("all_reduce", ends, work.width * shared[0].numel)
        yield GroupTraffic("tied embedding over pp", "all_reduce", ends, num_bytes, 1, False)


def _has_tied_ends(work: Work) -> bool:
    return bool(work.model.get("tie_word_embeddings", False)) or work.plan.mtp.train
