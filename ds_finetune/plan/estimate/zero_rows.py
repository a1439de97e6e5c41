"""Memory rows: the bytes that a rank holds for one purpose, in one memory, at certain moments of a step. This module
counts the elements that a rank holds and trains, and makes the rows of DeepSpeed 0.19.8: weights, gradients, optimizer
states and buffers, by ZeRO stage.

File names below are relative to deepspeed/runtime.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple, Self, get_args

from ds_finetune.config.objectives import is_distillation
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.families.family import layer_of
from ds_finetune.plan.deepspeed_config import OPTIMIZERS
from ds_finetune.plan.layer_stages import RankWeights, TensorKind, rank_weights
from ds_finetune.plan.lora_targets import nf4_bytes
from ds_finetune.plan.model_tensors import EMBEDDING, HEAD, DescribedModel
from ds_finetune.plan.name_patterns import last_part
from ds_finetune.plan.plan import Plan, is_teacher_partitioned
from ds_finetune.plan.precision import WEIGHT_BYTES
from ds_finetune.plan.trained_parts import TrainedTensors

Place = Literal["gpu", "host", "nvme", "disk"]
Moment = Literal[
    "teacher",
    "gathering",
    "forward",
    "head",
    "head backward",
    "layers",
    "embedding",
    "reduction",
    "step",
    "exchange",
    "rollout",
]
"""Moments of an optimizer step: forward of a teacher; gathering of weights before a layer's forward; forward of the
model's layers; head and loss; their backward; backward of the layers; gradient of the embedding; reduction of
gradients; optimizer update; exchange of updated weights. `rollout` is the sampling of answers between steps.
"""
MOMENTS: tuple[Moment, ...] = get_args(Moment)
FORWARD: tuple[Moment, ...] = ("gathering", "forward", "head")
BACKWARD: tuple[Moment, ...] = ("head backward", "layers", "embedding")
MICRO_BATCH: tuple[Moment, ...] = ("teacher", *FORWARD, *BACKWARD)
"""Moments of an optimizer step in which a micro-batch is computed."""
KEPT_FOR_BACKWARD: tuple[Moment, ...] = (*FORWARD, "head backward", "layers")
"""Moments of a step in which layers hold activations for their backward."""


@dataclass(frozen=True)
class MemoryRow:
    """The memory of a rank for one purpose, such as gradients."""

    name: str
    place: Place
    num_bytes: int
    option: str = ""
    """The option of the run file that lowers this memory; empty without one."""
    when: tuple[Moment, ...] = MOMENTS


def peak(rows: Sequence[MemoryRow], place: Place) -> int:
    """Maximum, over the moments of a step, of the bytes that all rows together hold in the memory `place`."""
    return held(rows, place, fullest_moment(rows, place))


def fullest_moment(rows: Sequence[MemoryRow], place: Place) -> Moment:
    """The moment of a step in which the rows hold most bytes in the memory `place`."""
    return max(MOMENTS, key=lambda moment: held(rows, place, moment))


def held(rows: Sequence[MemoryRow], place: Place, moment: Moment) -> int:
    """Bytes that the rows hold in the memory `place` at a moment of a step."""
    return sum(row.num_bytes for row in rows if row.place == place and moment in row.when)


_WIDE = WEIGHT_BYTES["fp32"]
_ZERO, _TP = "deepspeed.zero_optimization", "parallel.tp"
_STAGE, _OPTIMIZER, _PARAM = f"{_ZERO}.stage", f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"
_HPZ, _SUB_GROUP = f"{_ZERO}.zero_hpz_partition_size", f"{_ZERO}.sub_group_size"
_BUCKET = f"{_ZERO}.reduce_bucket_size"


_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_model_persistence_threshold": 2**63 - 1,
    "contiguous_gradients": True,
}
"""DeepSpeed's defaults of options of `zero_optimization` (zero/config.py:113-251)."""
_NVME_DEFAULTS = {
    "offload_param": {"buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000},
    "offload_optimizer": {"buffer_count": 4},
}
"""DeepSpeed's defaults of options for offload to NVMe (zero/offload_config.py:33-67)."""
_UNTIL_REDUCED: tuple[Moment, ...] = (*MICRO_BATCH, "reduction")


class FetchingRules(NamedTuple):
    """Options of `zero_optimization` that limit how many elements of weights ZeRO-3 prefetches and keeps gathered."""

    prefetch_bucket: int
    max_live: int
    max_reuse: int
    persistence: int
    """Tensors with at most this number of elements stay gathered on every rank."""
    persistent_of_model: int

    @classmethod
    def of(cls, zero: Mapping[str, Any]) -> Self:
        """Limits of prefetching from a `zero_optimization` section; missing options have DeepSpeed's defaults."""
        names = [name for name in _DEFAULTS if name.startswith("stage3_")]
        return cls(*(int(float(zero.get(name, _DEFAULTS[name]))) for name in names))


DEFAULT_RULES = FetchingRules.of({})


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
    """Sharded elements that the optimizer updates at once, in the largest of its groups: experts divided by
    `parallel.ep`, vectors, indexers, and prediction layers with a loss of their own are separate groups
    (engine/state/parameter_tags.py).
    """
    largest: int
    """Elements of the largest trained tensor."""
    packed_bytes: int = 0
    """Bytes of 4-bit weights, which ZeRO-3 shards."""
    scales_bytes: int = 0
    """Bytes of the scales of 4-bit weights, which every rank holds."""
    dequantised: int = 0
    """Elements of the largest 4-bit weight, which is dequantised to the run's precision while it is used."""


def rank_elements(plan: Plan, trained: TrainedTensors, weights: RankWeights) -> RankElements:
    """Count trained, frozen and 4-bit elements on a rank of one pipeline stage."""
    adapters = _adapter_kinds(trained, (plan.mesh.tp, plan.mesh.ep, plan.zero_ranks), weights.layers)
    updated = [*adapters, *(kind for each in weights.kinds if (kind := each.among(trained.full)).count)]
    quantised = [weight.shape for name, weight in trained.quantised.items() if layer_of(name) in weights.layers]
    groups, packed = Counter[tuple[int, str, bool]](), sum(map(prod, quantised))
    detached = weights.predictions if plan.mtp.detach else ()
    for kind in updated:
        for name in kind.names:
            loss = "mtp" if layer_of(name) in detached else "indexer" if ".indexer." in name else ""
            is_vector = len(kind.local) < 2 or name.endswith("bias")
            groups[kind.sharers, loss, is_vector] += kind.sharded // kind.count
    tensors = (*weights.kinds, *adapters)
    return RankElements(
        tensors=tensors,
        trains_embedding=any(kind.name == EMBEDDING for kind in updated),
        weights=sum(kind.numel for kind in tensors) - packed,
        sharded_weights=sum(kind.sharded for kind in tensors) - packed // plan.zero_ranks,
        trained=sum(kind.numel for kind in updated),
        sharded_trained=sum(groups.values()),
        largest_group=max(groups.values(), default=0),
        largest=max((kind.numel // kind.count for kind in updated), default=0),
        packed_bytes=packed // 2,
        scales_bytes=sum(map(nf4_bytes, quantised)) - packed // 2,
        dequantised=max(map(prod, quantised), default=0),
    )


@lru_cache(maxsize=4096)
def _adapter_kinds(
    trained: TrainedTensors, sizes: tuple[int, int, int], layers: tuple[int, ...]
) -> tuple[TensorKind, ...]:
    """Kinds of LoRA tensors on a rank that holds the layers `layers`. `sizes` has the tensor parallel size, the expert
    parallel size, and the number of ranks over which ZeRO shards.
    """
    tp, ep, zero_ranks = sizes
    names_by_kind: dict[TensorKind, list[str]] = {}
    for name, weight in trained.adapted.items():
        if layer_of(name) not in layers:
            continue
        shapes = (trained.adapter_shapes(shape) for shape in (weight.shape, weight.local(tp=tp, ep=ep)))
        for full, own in zip(*shapes, strict=True):
            # Expert parallelism divides experts over ep ranks already, so ZeRO shards an expert over fewer ranks.
            kind = TensorKind(last_part(name), 0, full, own, zero_ranks // (ep if weight.is_routed else 1))
            names_by_kind.setdefault(kind, []).append(name)
    return tuple(replace(kind, count=len(names), names=tuple(names)) for kind, names in names_by_kind.items())


@dataclass(frozen=True)
class _Zero:
    """Plan of a run and numbers of elements of a rank, which determine DeepSpeed's memory."""

    plan: Plan
    own: RankElements

    @property
    def home(self) -> Place:
        return self.plan.home

    @property
    def width(self) -> int:
        return self.plan.weight_bytes

    @property
    def accumulated(self) -> int:
        """Bytes per element of accumulated gradients."""
        return WEIGHT_BYTES.get(str(self.plan.accumulation_dtype), self.width)

    @property
    def is_accumulating(self) -> bool:
        return self.plan.accumulation > 1

    @property
    def is_offloaded(self) -> bool:
        return self.plan.offload_optimizer != "none"

    @property
    def optimizer_place(self) -> Place:
        return place_of(self.plan.offload_optimizer, self.home)

    def option(self, name: str) -> Any:  # noqa: ANN401 - a number or a bool
        return self.plan.zero.get(name, _DEFAULTS[name])

    def nvme_option(self, section: str, name: str) -> int:
        given = self.plan.zero.get(section) or {}
        return int(float(given.get(name, _NVME_DEFAULTS[section][name])))

    @property
    def sub_group(self) -> int:
        """Elements that ZeRO-3's optimizer updates at a time on a rank."""
        smallest = -(-self.own.largest // self.plan.zero_ranks)
        return min(self.own.largest_group, max(int(self.option("sub_group_size")), smallest))

    @property
    def buckets(self) -> int:
        """Bytes of the buckets in which gradients are reduced: two where communication overlaps with backward at stages
        1 and 2 (zero/stage_1_and_2.py:3256-3279), one at stage 3 (zero/stage3.py:782). On a GPU they have the
        configured size; on a CPU memory is allocated only where gradients are written.
        """
        most = bucket_bytes(self.plan)
        if self.home != "host":
            return most
        return min(most, most // int(self.option("reduce_bucket_size")) * self.own.trained)


def bucket_bytes(plan: Plan) -> int:
    """Address space in bytes of the buckets in which DeepSpeed reduces gradients."""
    options = _DEFAULTS | plan.zero
    if not options["contiguous_gradients"] or not plan.zero_stage:
        return 0
    overlaps = options.get("overlap_comm") and plan.zero_stage < 3
    return int(options["reduce_bucket_size"]) * plan.weight_bytes * (2 if overlaps else 1)


def zero_rows(plan: Plan, own: RankElements) -> Iterator[MemoryRow]:
    """Memory rows for DeepSpeed's weights, gradients, optimizer states and buffers on a rank."""
    run = _Zero(plan, own)
    yield from _four_bit_rows(run)
    if plan.reduces_once:
        size = run.width * own.trained
        yield MemoryRow("gradients until they are reduced", run.home, size, "train.reduction_every", _UNTIL_REDUCED)
    if plan.zero_stage == 3:
        yield from _rows_of_stage_3(run)
        return
    yield MemoryRow("weights", run.home, run.width * own.weights, _STAGE)
    yield from _optimizer_rows(run)
    yield from _rows_of_stage_0(run) if plan.zero_stage == 0 else _rows_of_stages_1_and_2(run)


def place_of(offload: str, home: Place) -> Place:
    """The memory that holds a state whose offload device is `offload`; `home` is the memory of the rank's device."""
    memories: dict[str, Place] = {"none": home, "cpu": "host", "nvme": "nvme"}
    return memories[offload]


def _four_bit_rows(run: _Zero) -> Iterator[MemoryRow]:
    own, parts = run.own, run.plan.zero_ranks if run.plan.zero_stage == 3 else 1
    if own.packed_bytes:
        size = own.scales_bytes + -(-own.packed_bytes // parts)
        yield MemoryRow("weights in four bits", run.home, size, _STAGE if parts == 1 else "")
        size = run.width * own.dequantised
        yield MemoryRow("a weight of four bits while it is used", run.home, size, "", MICRO_BATCH)


def _optimizer_rows(run: _Zero) -> Iterator[MemoryRow]:
    """Memory rows for fp32 master weights and optimizer moments. Stage 0 in fp32 updates the weights themselves. Other
    stages copy the weights at any precision (zero/stage_1_and_2.py:560). zero/stage3.py:1162 should avoid the copy in
    fp32, but compares a torch.device with a str.
    """
    stage, own = run.plan.zero_stage, run.own
    updated, option = (own.sharded_trained if stage else own.trained), _OPTIMIZER if stage else _STAGE
    if stage or run.width < _WIDE:
        yield MemoryRow("fp32 weights", run.optimizer_place, _WIDE * updated, option)
    moments = int(OPTIMIZERS[run.plan.optimizer].state_bytes * updated)
    yield MemoryRow("moments", run.optimizer_place, moments, option)
    if run.is_offloaded:
        yield MemoryRow("fp32 gradients for the update", run.optimizer_place, _WIDE * updated, _STAGE)


def _rows_of_stage_0(run: _Zero) -> Iterator[MemoryRow]:
    """Memory rows for gradients of all weights at ZeRO stage 0. Gradients in 16 bits are also copied to fp32, one at a
    time (fp16/unfused_optimizer.py:227), or all at once with DeepSpeed's FusedAdam (fp16/fused_optimizer.py:286).
    """
    own, plan = run.own, run.plan
    yield MemoryRow("gradients", run.home, run.width * own.trained, _STAGE)
    if run.width < _WIDE:
        # DeepSpeed selects one of two 16-bit optimizers in engine.py, _configure_fp16_optimizer. The one that uses
        # FusedAdam needs twice the memory.
        size = (2 if plan.needs_fused_adam else 1) * _WIDE * own.trained
        yield MemoryRow("fp32 gradients for the update", run.home, size, _STAGE, ("step",))
    if plan.world.world_size > 1:
        bucket = run.width * min(own.trained, _DEFAULTS["reduce_bucket_size"])
        yield MemoryRow("bucket of gradients", run.home, int(bucket), _STAGE, ("reduction",))


def _rows_of_stages_1_and_2(run: _Zero) -> Iterator[MemoryRow]:
    """Memory rows for gradients at ZeRO stages 1 and 2.

    Stage 1 keeps the gradients of all weights until they are reduced after backward; stage 2 reduces them during
    backward. Both stages copy the gradients of a rank's partition (grads_in_partition, zero/stage_1_and_2.py:2192). For
    the update, they flatten these copies and convert them to fp32 (3117-3125). With offload, gradients are
    copied to the host bucket by bucket.
    """
    own, sharded = run.own, run.own.sharded_trained
    in_backward = run.plan.zero_stage == 2 and not run.plan.reduces_once
    if not in_backward and not run.plan.reduces_once:
        when = _UNTIL_REDUCED if run.is_accumulating else (*BACKWARD, "reduction")
        yield MemoryRow("gradients", run.home, run.width * own.trained, _STAGE, when)
    if run.home == "host" and run.plan.zero_ranks > 1:
        # Gloo receives all partitions of the weights in a buffer of its own (runtime/utils.py:1008).
        size = run.width * run.own.trained
        yield MemoryRow("updated weights as they arrive", run.home, size, _TP, ("exchange",))
    moments: tuple[Moment, ...] = (*BACKWARD, "reduction") if in_backward else ("reduction",)
    yield MemoryRow("buckets of gradients", run.home, run.buckets, _BUCKET, moments)
    if run.is_offloaded:
        yield from _offload_rows_of_stages_1_and_2(run)
        # DeepSpeed computes the norm of each reduced gradient in fp64 (zero/stage_1_and_2.py:1886).
        size, when = 8 * min(own.largest, sharded), tuple(each for each in moments if each != "head backward")
        yield MemoryRow("a gradient for its norm", run.home, size, _TP, when)
        return
    when_held: tuple[Moment, ...] = MOMENTS if run.is_accumulating and in_backward else (*moments, "step")
    yield MemoryRow("gradients of this rank's part", run.home, run.accumulated * sharded, _TP, when_held)
    if run.is_accumulating and in_backward and run.accumulated == run.width:
        # In a step, gradients of the second and later forwards go to a new partition, and are then added to the
        # partition of the first forward (zero/stage_1_and_2.py:1042-1045).
        yield MemoryRow("gradients of this forward", run.home, run.width * sharded, _TP, (*BACKWARD, "reduction"))
    group = run.own.largest_group
    flat = run.accumulated * group + (_WIDE * group if run.accumulated < _WIDE else 0)
    if run.width < run.accumulated:
        # If gradients of 16-bit weights are in fp32, DeepSpeed sums them in one tensor, which the update reads without
        # a copy (zero/stage_1_and_2.py:1259-1321, 3107).
        flat = 0
    yield MemoryRow("fp32 gradients for the update", run.home, flat, _TP, ("step",))


def _offload_rows_of_stages_1_and_2(run: _Zero) -> Iterator[MemoryRow]:
    """Memory rows for the buffers of offload at ZeRO stages 1 and 2 (zero/stage_1_and_2.py). They hold updated weights
    (571) and the largest gradient, once on the host and once on the device (653-659). If a step has several
    micro-batches, they also hold the gradients of a rank's partition (1824).
    """
    sharded, largest = run.width * run.own.sharded_trained, run.width * run.own.largest
    yield MemoryRow("updated weights on their way", "host", sharded)
    yield MemoryRow("a gradient on its way, on the host", "host", largest)
    yield MemoryRow("a gradient on its way", run.home, largest)
    if run.is_accumulating:
        yield MemoryRow("gradients of this rank's part", "host", sharded, "train.micro_batch_size")


def _rows_of_stage_3(run: _Zero) -> Iterator[MemoryRow]:
    """Memory rows of ZeRO stage 3: for a rank's partition of weights (lp_param_buffer), for gathered weights, for its
    partition of gradients (grad_partitions_flat_buffer, zero/stage3.py:791), and for fp32 gradients of a sub-group
    (stage3.py:2686).
    """
    plan, own, sharded = run.plan, run.own, run.own.sharded_trained
    yield MemoryRow("weights", place_of(plan.offload_param, run.home), run.width * own.sharded_weights, _PARAM)
    # With hpZ of ZeRO++, the ranks of each hpZ group together hold a second copy of all weights.
    if (parts := int(plan.zero.get("zero_hpz_partition_size", 1))) > 1:
        # An optimizer step drops the secondary copies of weights (zero/stage3.py:2846); the next forward makes new
        # ones.
        size = run.width * -(-own.weights // parts)
        yield MemoryRow("second weights", place_of(plan.offload_param, run.home), size, _HPZ, _UNTIL_REDUCED)
    yield from _gathered_rows(run)
    yield from _optimizer_rows(run)
    gradients = "host" if run.is_offloaded else run.home
    yield MemoryRow("gradients of this rank's part", gradients, run.accumulated * sharded, _OPTIMIZER)
    yield MemoryRow("buckets of gradients", run.home, run.buckets, _BUCKET)
    # DeepSpeed copies the gradients in a bucket to sort them by the rank that receives them
    # (comm/coalesced_collectives.py:122).
    copied = run.width * min(int(run.option("reduce_bucket_size")), own.trained) if plan.zero_ranks > 1 else 0
    yield MemoryRow("gradients of a bucket by rank", run.home, copied, _BUCKET, BACKWARD)
    yield from _nvme_rows(run)
    if not run.is_offloaded:
        flat = run.accumulated * run.sub_group + (_WIDE * run.sub_group if run.accumulated < _WIDE else 0)
        yield MemoryRow("fp32 gradients for the update", run.home, flat, _SUB_GROUP, ("step",))


def _nvme_rows(run: _Zero) -> Iterator[MemoryRow]:
    """Memory rows for host memory that ZeRO-3 uses with offload to NVMe. The optimizer needs pinned fp32 buffers of
    the largest sub-group (swap_tensor/utils.py:192, from zero/stage3.py:848). Weights need pinned buffers
    (swap_tensor/partitioned_param_swapper.py:124), and some weights stay on the host (zero/stage3.py:897-907).
    """
    if run.plan.offload_optimizer == "nvme":
        size = _WIDE * run.sub_group * run.nvme_option("offload_optimizer", "buffer_count")
        yield MemoryRow("buffers between optimizer and NVMe", "host", size, _SUB_GROUP)
    if run.plan.offload_param == "nvme":
        count, numel = (run.nvme_option("offload_param", name) for name in ("buffer_count", "buffer_size"))
        yield MemoryRow("buffers between weights and NVMe", "host", run.width * count * numel, f"{_PARAM}.buffer_count")
        numel = min(run.own.sharded_trained, run.nvme_option("offload_param", "max_in_cpu"))
        yield MemoryRow("weights of NVMe that stay on the host", "host", run.width * numel, f"{_PARAM}.max_in_cpu")


def _gathered_rows(run: _Zero) -> Iterator[MemoryRow]:
    """Memory rows for gathered weights on a rank: small ones, prefetched ones, and the buffers that receive them
    (zero/partition_parameters.py:795). With recomputation, forward and backward together run each layer three times.
    """
    rules = FetchingRules.of(run.plan.zero)
    small = run.width * num_persistent(run.own.tensors, rules)
    yield MemoryRow("small weights, whole", run.home, small, f"{_ZERO}.stage3_param_persistence_threshold")
    passes = 3 if run.plan.recomputes else 2
    # A weight that only one rank holds needs no gathering (zero/partition_parameters.py:1563).
    fetched = [kind for kind in run.own.tensors if kind.sharers > 1 or run.plan.offload_param != "none"]
    by_moment = gathered_weights(
        fetched, rules, passes=passes, home=run.home, trains_embedding=run.own.trains_embedding
    )
    for gathered in by_moment:
        name, option = f"gathered weights, {gathered.during}", f"{_ZERO}.stage3_max_live_parameters"
        yield MemoryRow(name, run.home, run.width * gathered.numel, option, gathered.when)
        name, option = f"weights that arrive, {gathered.during}", f"{_ZERO}.stage3_prefetch_bucket_size"
        yield MemoryRow(name, run.home, run.width * gathered.arriving, option, gathered.when)


class GatheredWeights(NamedTuple):
    """Gathered ZeRO-3 weights on a rank during a part of a step: `numel` is the maximum number of their elements. Small
    weights, which are always gathered, do not count.
    """

    during: str
    when: tuple[Moment, ...]
    numel: int
    arriving: int
    """Elements of the buffers of all-gathers, which weights are copied out of."""


def num_persistent(kinds: Sequence[TensorKind], rules: FetchingRules) -> int:
    """Number of elements of small weights, which every rank keeps gathered (parameter_offload.py:317)."""
    # A tensor whose size equals the threshold still counts as small (partition_parameters.py:1292).
    small = sum(kind.numel for kind in kinds if kind.numel // kind.count <= rules.persistence)
    return min(small, rules.persistent_of_model)


def gathered_weights(
    kinds: Sequence[TensorKind], rules: FetchingRules, *, passes: int, home: Place, trains_embedding: bool = False
) -> tuple[GatheredWeights, ...]:
    """For each part of a step, the maximum number of gathered elements on a rank, of the weights `kinds`. `home` is the
    memory of the rank's device. Forward and backward together run each layer `passes` times; without
    `trains_embedding` the embedding has only a forward.

    DeepSpeed prefetches a bucket of weights when it enters a module, even if the module has no weights
    (partitioned_param_coordinator.py:436-470), until `max_live` elements are gathered. The tensor gathered last, such
    as the embedding, may exceed that limit. Weights stay gathered if they are prefetched again before their use
    (614-616), or used again within `max_reuse` elements (621-630). So with a bucket above 0, DeepSpeed gathers as
    much as `max_live` allows.
    """
    fetched = [kind for kind in kinds if kind.numel // kind.count > rules.persistence]
    total, modules = sum(kind.numel for kind in fetched), Counter[str]()
    for kind in fetched:
        modules[_module_of(kind.name) or kind.names[0]] += kind.numel // kind.count
    head = modules.pop(_module_of(HEAD), 0)
    largest = max(modules.values(), default=0)
    # Weights used again within `max_reuse` elements stay gathered. Between two uses of a layer, the head may run
    # forward and backward, so its elements count at most twice.
    near = max(rules.max_reuse - 2 * head, 0) // passes
    reused, ahead = near + largest, rules.max_live if rules.prefetch_bucket else 0
    gathers = _gathers(fetched, rules.prefetch_bucket)
    # A frozen embedding has no backward: it is released when it has been used, unless it is also the head.
    once = 0 if trains_embedding or not head else modules[_module_of(EMBEDDING)]
    begun = sum(numel for numel, _ in gathers[:_ENTERED_WITH_EMBEDDING])
    with_head = min(max(total - once, begun), max(reused + head, ahead + max(largest, head)))
    without_head = min(total - once - head, max(reused, ahead + largest))
    *_, earlier, copied = sorted((0, 0, *(numel for numel, count in gathers if count > 1)))
    # Gloo gathers in memory of its own (ProcessGroupGloo.cpp), while weights of an earlier gather are still used.
    in_gloo = max((numel for numel, _ in gathers), default=0)
    arriving = in_gloo + earlier if home == "host" else copied
    refetched = arriving if without_head < total - once - head else 0
    return (
        GatheredWeights("gathering", ("gathering",), with_head, arriving),
        GatheredWeights("forward", ("forward",), with_head, copied),
        GatheredWeights("head", ("head", "head backward"), with_head, 0),
        GatheredWeights("backward", ("layers", "embedding"), without_head, refetched),
    )


_ENTERED_WITH_EMBEDDING = 4
"""Number of modules entered when the embedding is computed: the loss, the causal LM, the base model and the embedding.
At each of them DeepSpeed prefetches a bucket.
"""


def _gathers(kinds: Sequence[TensorKind], bucket: int) -> list[tuple[int, int]]:
    """Elements and number of the weights of each all-gather in forward. A gather takes weights until they have as many
    elements as a bucket. It receives several weights in one buffer, copies each out of it, and holds the buffer until
    the last of them is used (partition_parameters.py:761-803); a single weight stays where it is received (1607).
    """
    sizes = []
    for number, kind in enumerate(kinds):
        for name in kind.names:
            # Other tensors outside of layers, such as the head, follow the layers.
            layer = layer_of(name) if name == EMBEDDING or layer_of(name) >= 0 else sys.maxsize
            sizes.append((layer, number, kind.numel // kind.count))
    gathers, numel, count = list[tuple[int, int]](), 0, 0
    for *_, size in sorted(sizes):
        numel, count = numel + size, count + 1
        if numel >= bucket:
            gathers.append((numel, count))
            numel = count = 0
    return [*gathers, (numel, count)] if count else gathers


def teacher_rows(plan: Plan, teacher: DescribedModel | None) -> Iterator[MemoryRow]:
    """Memory rows for a teacher that runs beside the model, on a rank of the last pipeline stage; none without one."""
    section = plan.objective
    if not is_distillation(section) or teacher is None:
        return
    is_cut = is_teacher_partitioned(plan.zero_stage, section.teacher_offload)
    (weights,) = rank_weights(teacher, ParallelConfig(), zero_ranks=plan.world.world_size if is_cut else 1)
    home, width, place = plan.home, plan.weight_bytes, place_of(section.teacher_offload, plan.home)
    yield MemoryRow("weights of the teacher", place, width * weights.sharded, "objective.teacher_offload")
    if not is_cut:
        return
    # ZeRO-3 gathers the teacher's weights by DeepSpeed's default options, not by the run's. The head has its own row.
    kinds = [kind for kind in weights.kinds if kind.name != HEAD]
    yield MemoryRow("small weights of the teacher, whole", home, width * num_persistent(kinds, DEFAULT_RULES))
    forward, *_ = gathered_weights(kinds, DEFAULT_RULES, passes=1, home=home)
    yield MemoryRow("gathered weights of the teacher", home, width * forward.numel, "", ("teacher",))
    yield MemoryRow("weights of the teacher that arrive", home, width * forward.arriving, "", ("teacher",))
    sizes = {kind.name: kind.numel for kind in weights.kinds}
    yield MemoryRow("head of the teacher, whole", home, width * sizes.get(HEAD, sizes[EMBEDDING]), "", ("head",))


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
