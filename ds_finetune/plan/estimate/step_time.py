"""The time of an optimizer step by a roofline: computation, memory and messages of each layout on given machines.

A class of operators takes the longer of its FLOPs over the FLOP/s that it reaches and its bytes over the memory's
bandwidth. Added are messages that are not hidden, the pipeline's bubble, and the optimizer. `TimeEstimate.assumptions`
says what is assumed; docs/explanation/time-model.md explains the whole.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ds_finetune.config.schedule import Duration
from ds_finetune.families.parameters import ModelConfig
from ds_finetune.plan.deepspeed_config import MOMENTS
from ds_finetune.plan.estimate.accelerators import GB, Machine, check_precision
from ds_finetune.plan.estimate.compressed_layers import streams_of
from ds_finetune.plan.estimate.operations import (
    Operation,
    RowShape,
    Work,
    adapter_elements,
    executed_width,
    operations,
    shape_of,
)
from ds_finetune.plan.estimate.rank_weights import RankWeights, as_one_stage, is_trained, rank_elements, weights_of_run
from ds_finetune.plan.estimate.rollouts import samples_itself, sampling_of, sampling_operations, sampling_traffic
from ds_finetune.plan.estimate.rows import held
from ds_finetune.plan.estimate.traffic import Beside, Group, GroupTraffic, between_chunks, traffic
from ds_finetune.plan.estimate.zero_rows import zero_rows
from ds_finetune.plan.model_shape import Shape
from ds_finetune.plan.plan import Plan

_WIDE = 4
_KERNELS = {False: 40, True: 70}
"""Kernels of a layer's forward, without and with routed experts; a backward has twice as many. An assumption."""
_BACKWARD_KERNELS = 2
_GRADIENT_PASSES = 6
"""A gradient of a micro-batch is copied to its bucket and back, and added: three reads and three writes."""
_NVME_BYTES_PER_S = 5 * GB
_SECONDS_PER_HOUR = 3600
AGAINST_PUBLISHED = (0.41, 7.1)
"""Least and most of predicted over published tokens/s of nine runs (docs/explanation/time-model.md)."""
UNCONFIRMED = (
    "No GPU has confirmed these figures. Against nine published runs of other programs, the predicted tokens/s are "
    f"{AGAINST_PUBLISHED[0]:g} to {AGAINST_PUBLISHED[1]:g} times those that they had."
)


@dataclass(frozen=True)
class TimeEstimate:
    """How long an optimizer step takes, and the run where its number of steps is known without reading data."""

    parts: Mapping[str, float]
    """Seconds of a step by class of operators, kind of traffic, and so on; their sum is `seconds`."""
    tokens_per_second: float
    """Tokens of all ranks, with padding."""
    mfu: float
    """As the metric `perf/mfu`: 6 FLOPs for each parameter and token, and causal attention, over the dense peak of the
    run's precision; recomputation is not counted. With LoRA, where runs do not report it, 4 FLOPs for each parameter.
    """
    num_ranks: int
    steps: int | None
    """None where they depend on the number of rows."""
    assumptions: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Seconds of an optimizer step."""
        return sum(self.parts.values())

    @property
    def hours(self) -> float | None:
        """Hours of the run without evaluations and checkpoints."""
        return None if self.steps is None else self.steps * self.seconds / _SECONDS_PER_HOUR

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all ranks together."""
        return None if self.hours is None else self.hours * self.num_ranks

    @property
    def gpu_hours_per_billion_tokens(self) -> float:
        """Hours of all ranks together for a billion tokens with padding."""
        return self.num_ranks * 1e9 / self.tokens_per_second / _SECONDS_PER_HOUR


def estimate_time(plan: Plan, model: ModelConfig, *, machine: Machine, rows: RowShape) -> TimeEstimate:
    """The time of a step of the run of `plan` on `machine`; `model` is the config.json of its model.

    ConfigError where the machine has no products in the run's precision, or the model's arithmetic is not known.
    """
    check_precision(machine.accelerator, plan.precision)
    work = Work(plan, model, rows)
    parts = _slowest_stage(work, machine, weights_of_run(plan, model))
    seconds, tokens = sum(parts.values()), plan.batch.global_batch_size * rows.num_tokens
    per_second = tokens / seconds
    shape, is_frozen = shape_of(work), plan.lora is not None
    flops = shape.flops_per_token(rows.num_tokens, mean_attended=rows.mean_attended, is_frozen=is_frozen)
    ranks = plan.world.world_size
    return TimeEstimate(
        parts=parts,
        tokens_per_second=per_second,
        mfu=per_second * flops / (ranks * _peak(machine, plan.precision)),
        num_ranks=ranks,
        steps=_steps(plan.train.duration, tokens),
        assumptions=tuple(_assumptions(work, machine)),
    )


@dataclass(frozen=True)
class LeastSeconds:
    """Seconds of a step that a pipeline takes at least, however its layers are divided over its stages."""

    num_stages: int
    forwards: float
    """Seconds of all stages together in all forwards of a step."""
    end: float
    """Seconds of all stages together after the forwards."""
    send: float
    """Seconds of sending hidden states of all forwards to the next chunk of layers, or gradients to the one before."""

    def seconds(self, *, vpp: int, num_turns: int) -> float:
        """With `vpp` chunks on each stage and `num_turns` forwards of a chunk in a step. The seconds that
        `_slowest_stage` finds grow with those of the slowest stage, which are the mean at least, and with those of all
        stages.
        """
        if self.num_stages == 1:
            return self.forwards + self.end
        forwards = self.forwards + 2 * (vpp * self.num_stages - 1) * self.send
        return (1 - 1 / num_turns) * (forwards + self.end) / self.num_stages + forwards / num_turns


def least_seconds(plan: Plan, model: ModelConfig, *, machine: Machine, rows: RowShape) -> LeastSeconds:
    """What `estimate_time` finds for the run at least, whatever `parallel.vpp` and the layers of its stages are.

    Without a pipeline it is what `estimate_time` finds.
    """
    merged = as_one_stage(plan)
    work = Work(merged, model, rows)
    (weights,) = weights_of_run(merged, model)
    stage = _stage_seconds(work, machine, weights, 0)
    message = between_chunks(Work(plan, model, rows))
    send = sum(_exposed(machine, [message], {}).values()) if plan.mesh.pp > 1 else 0.0
    return LeastSeconds(plan.mesh.pp, sum(stage.forwards.values()), sum(stage.end.values()), send)


def group_rate(machine: Machine, group: Group, kind: str) -> float:
    """Bytes a second that a rank sends to its group by a kind of collective.

    Rings leave and enter a node once, through the network cards of all ranks of the group on it. In an exchange of all
    with all, each rank has its own share of the cards.
    """
    local = group.on_node(machine.gpus_per_node)
    share = machine.efficiency.link
    row = machine.accelerator
    inside, outside = share * row.intra_node_bytes_per_s, share * row.inter_node_bytes_per_s
    if local == group.size:
        return inside
    if kind in ("all_to_all", "send_recv"):
        away = (group.size - local) / (group.size - 1) if kind == "all_to_all" else 1.0
        return min(outside / away, inside / (1 - away) if away < 1 else outside)
    return min(inside, local * outside)


class _StageSeconds(NamedTuple):
    """Seconds of a step on a rank of one pipeline stage, by part."""

    forwards: dict[str, float]
    """Seconds of all micro-batches."""
    end: dict[str, float]
    """Seconds of what is done once after them."""

    @property
    def total(self) -> float:
        return sum(self.forwards.values()) + sum(self.end.values())


def _slowest_stage(work: Work, machine: Machine, stages: tuple[RankWeights, ...]) -> dict[str, float]:
    """The parts of a step on the pipeline stage that takes longest. It waits while its first micro-batch is on the
    stages before it, and the gradients of its last one on the same; with `parallel.vpp` while they are on one chunk of
    each.
    """
    found: dict[object, _StageSeconds] = {}
    order = []
    for number, weights in enumerate(stages):
        key = (frozenset(Counter(weights.layer_kinds).items()), number == 0, number == len(stages) - 1)
        if key not in found:
            found[key] = _stage_seconds(work, machine, weights, number)
        order.append(found[key])
    slowest = max(order, key=lambda stage: stage.total)
    parts = slowest.forwards | slowest.end
    if len(order) > 1:
        every = sum(sum(stage.forwards.values()) for stage in order)
        waits = every - sum(slowest.forwards.values())
        chunks = work.plan.parallel.vpp * work.plan.batch.gradient_accumulation_steps
        parts["pipeline bubble"] = waits / chunks
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _stage_seconds(work: Work, machine: Machine, weights: RankWeights, stage: int) -> _StageSeconds:
    times, is_last = work.plan.batch.gradient_accumulation_steps, stage == work.plan.mesh.pp - 1
    computed = _compute_seconds(work, machine, weights, is_last=is_last)
    teacher = teacher_config(work) if is_last else None
    if teacher is not None:
        reached = machine.efficiency.matmul * _peak(machine, work.plan.precision)
        computed["teacher"] = teacher_flops(work, teacher) / reached
    parts = {name: times * seconds for name, seconds in computed.items()}
    sent = traffic(work, weights, stage=stage)
    share = 0.0 if machine.blocks_host else machine.efficiency.hidden
    shared = parts.get("shared experts", 0.0)
    budgets: dict[Beside, float] = {"computation": share * sum(parts.values()), "shared experts": share * shared}
    if work.plan.recomputes:
        parts |= _recomputation(work, machine, weights, is_last=is_last, found=parts)
    parts |= _exposed(machine, [transfer for transfer in sent if transfer.is_each_forward], budgets)
    # Only the backward of the last micro-batch is still to come when its gradients are ready.
    last = {name: seconds / times * 2 / 3 for name, seconds in budgets.items()}
    end = _exposed(machine, [transfer for transfer in sent if not transfer.is_each_forward], last)
    sampling = _sampling_seconds(work, machine, weights, is_last=is_last)
    return _StageSeconds(parts, end | _optimizer_seconds(work, machine, weights) | sampling)


def _exposed(machine: Machine, transfers: list[GroupTraffic], budgets: Mapping[Beside, float]) -> dict[str, float]:
    """Seconds of transfers by name, less what is hidden beside so many seconds of computation: of all, and of shared
    experts alone.
    """
    found: dict[str, float] = {}
    left = dict(budgets)
    for transfer in transfers:
        latency = machine.efficiency.message_seconds * max(1.0, math.log2(transfer.group.size))
        seconds = transfer.num_bytes / group_rate(machine, transfer.group, transfer.kind)
        seconds += transfer.num_messages * latency
        if transfer.beside:
            hidden = min(left["computation"], left[transfer.beside], machine.efficiency.hidden * seconds)
            for computed in {"computation", transfer.beside}:
                left[computed] -= hidden
            seconds -= hidden
        found[transfer.name] = found.get(transfer.name, 0.0) + seconds
    return found


def _compute_seconds(work: Work, machine: Machine, weights: RankWeights, *, is_last: bool) -> dict[str, float]:
    """Seconds of a micro-batch by class of operators, recomputation included."""
    found = _roofline(work, machine, operations(work, weights, is_last=is_last))
    passes = 1 + _BACKWARD_KERNELS + work.plan.recomputes + work.extra_forwards
    kernels = passes * sum(_KERNELS[layer.is_sparse] for layer in weights.layer_kinds)
    if machine.calls_each_document:
        kernels += passes * len(weights.layers) * len(work.rows.documents) * work.num_rows
    host = kernels * machine.efficiency.launch_seconds
    found["kernel launches"] = host if machine.blocks_host else max(0.0, host - sum(found.values()))
    return found


def _sampling_seconds(work: Work, machine: Machine, weights: RankWeights, *, is_last: bool) -> dict[str, float]:
    """Seconds of the sampling of a step's answers; nothing where the ranks sample none."""
    plan = work.plan
    if not samples_itself(plan):
        return {}
    own = tuple(zero_rows(plan, rank_elements(plan, work.model, weights), weights))
    free = machine.accelerator.memory_bytes - held(own, "host" if plan.device == "cpu" else "gpu", "rollout")
    found = sampling_of(plan, work.model, weights, free=free)
    busy = sum(_roofline(work, machine, tuple(sampling_operations(work, weights, found, is_last=is_last))).values())
    kernels = sum(_KERNELS[layer.is_sparse] for layer in weights.layer_kinds)
    host = kernels * found.batches * plan.rollout.max_new_tokens * machine.efficiency.token_seconds
    seconds = busy + host if machine.blocks_host else max(busy, host)
    seconds += sum(_exposed(machine, list(sampling_traffic(work, weights, found)), {}).values())
    if plan.offload_param != "none":
        copied = work.width * sum(kind.sharded for kind in weights.kinds) * found.batches * plan.rollout.max_new_tokens
        seconds += copied / (machine.efficiency.host_link * machine.accelerator.pcie_bytes_per_s)
    return {"sampling of answers": seconds / plan.rollout.steps_per_rollout}


def _recomputation(
    work: Work, machine: Machine, weights: RankWeights, *, is_last: bool, found: Mapping[str, float]
) -> dict[str, float]:
    """The seconds `found` of all micro-batches by class of operators, with what recomputation adds apart."""
    once = replace(work, plan=replace(work.plan, activation_checkpointing="none"))
    times = work.plan.batch.gradient_accumulation_steps
    needed = {
        name: times * seconds
        for name, seconds in _roofline(work, machine, operations(once, weights, is_last=is_last)).items()
    }
    return {**needed, "recomputation": sum(found[name] - seconds for name, seconds in needed.items())}


def _roofline(work: Work, machine: Machine, found: tuple[Operation, ...]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for operation in found:
        share = getattr(machine.efficiency, operation.unit)
        busy = operation.flops / (share * _peak(machine, work.plan.precision)) if operation.unit != "memory" else 0.0
        moved = operation.num_bytes / (machine.efficiency.memory * machine.accelerator.memory_bandwidth)
        moved /= machine.efficiency.new_memory if operation.unit == "memory" else 1.0
        seconds[operation.name] = seconds.get(operation.name, 0.0) + max(busy, moved)
    return seconds


def _peak(machine: Machine, precision: str) -> float:
    return machine.accelerator.fp32_flops if precision == "fp32" else machine.accelerator.bf16_flops


def _optimizer_seconds(work: Work, machine: Machine, weights: RankWeights) -> dict[str, float]:
    """Accumulation of gradients, the optimizer's update where its states are, and what is copied from and to hosts."""
    plan, times, lora = work.plan, work.plan.batch.gradient_accumulation_steps, work.plan.lora
    whole = updated = 0.0
    for kind in weights.kinds:
        numel = adapter_elements(lora, kind) if lora else kind.numel * is_trained(work.plan, work.model, kind)
        whole += numel
        updated += numel / (kind.sharers if plan.zero_stage else 1)
    device = machine.efficiency.memory * machine.accelerator.memory_bandwidth
    # Gradient and its fp32 copy, fp32 weight and moments read and written, and the weight written.
    each = 2 * work.width + 3 * _WIDE + 2 * _WIDE * (1 + MOMENTS[plan.optimizer])
    home = device if plan.offload_optimizer == "none" else machine.host_bandwidth / machine.gpus_per_node
    found = {
        "gradients in memory": times * _GRADIENT_PASSES * work.width * whole / device,
        "optimizer": each * updated / home,
    }
    copied = dict(_copied_bytes(work, weights, updated))
    rate = machine.efficiency.host_link * machine.accelerator.pcie_bytes_per_s
    found["copies from and to the host"] = sum(copied.values()) / rate
    if "nvme" in (plan.offload_optimizer, plan.offload_param):
        states = 2 * _WIDE * (1 + MOMENTS[plan.optimizer]) * updated
        found["NVMe"] = states * machine.gpus_per_node / _NVME_BYTES_PER_S
    return found


def _copied_bytes(work: Work, weights: RankWeights, updated: float) -> Iterator[tuple[str, float]]:
    """Bytes of a step between device and host."""
    plan, times = work.plan, work.plan.batch.gradient_accumulation_steps
    if plan.offload_optimizer != "none":
        reductions = 1 if plan.zero_stage < 2 or plan.reduces_once else times
        yield "gradients", reductions * work.width * updated
        yield "updated weights", work.width * updated
    if plan.offload_param != "none":
        # In forward and again in backward.
        yield "weights", 2 * times * work.width * sum(kind.sharded for kind in weights.kinds)
    if plan.train.activation_offload:
        hidden = streams_of(work.model) * work.model["hidden_size"]
        yield "inputs of layers", 2 * times * work.width * hidden * work.num_tokens * len(weights.layers)


def _steps(duration: str, tokens: int) -> int | None:
    length = Duration.parse(duration)
    if length.unit == "epochs":
        return None
    return int(length.value) if length.unit == "steps" else math.ceil(length.value / tokens)


def teacher_config(work: Work) -> ModelConfig | None:
    """The config.json of the run's teacher; None without a teacher, or where its folder is not on this machine."""
    folder = getattr(work.plan.objective, "teacher", None)
    file = Path(folder or "") / "config.json"
    if not folder or not file.is_file():
        return None
    found: ModelConfig = json.loads(file.read_text(encoding="utf-8"))
    return found


def teacher_flops(work: Work, teacher: ModelConfig) -> float:
    """FLOPs of its forward for a micro-batch: no gradients, and logits of supervised tokens."""
    shape = Shape.of(teacher)
    shape = replace(shape, attention_width=round(executed_width(work, teacher, shape)))
    head = shape.embedding if shape.tied else shape.head
    each = shape.flops_per_token(work.rows.num_tokens, mean_attended=work.rows.mean_attended) / 3
    return work.num_tokens * (each - 2 * head) + 2 * head * work.num_supervised


def _assumptions(work: Work, machine: Machine) -> Iterator[str]:
    """Sentences about rates, rows, experts, what is hidden, and what is left out."""
    share, row = machine.efficiency, machine.accelerator
    yield (
        f"Matrix products reach {share.matmul:.0%} of the peak of {row.name}, those of routed experts "
        f"{share.grouped:.0%}, attention {share.attention:.0%}; other operators {share.memory:.0%} of the "
        "memory's bandwidth."
    )
    if work.plan.world.world_size > 1:
        yield (
            f"A rank sends {row.intra_node_bytes_per_s / GB:,.3g} GB/s within a node of {machine.gpus_per_node} ranks "
            f"and {row.inter_node_bytes_per_s / GB:,.3g} GB/s between nodes ({row.network}); collectives reach "
            f"{share.link:.0%} of it."
        )
        yield (
            "Collectives block the ranks, so that nothing is hidden behind computation."
            if machine.blocks_host
            else f"Traffic that DeepSpeed overlaps is hidden to {share.hidden:.0%}, in at most {share.hidden:.0%} of "
            "the time of computation; that of tp, sp and pp never is."
        )
    yield from machine.notes
    rows = work.rows
    yield (
        f"A row has {rows.num_tokens:,} tokens in {len(rows.documents)} document{'s' * (len(rows.documents) > 1)}, "
        f"{rows.num_supervised / rows.num_tokens:.0%} of them supervised; all ranks have equal work."
    )
    if work.experts_per_token:
        yield "Tokens are divided evenly over routed experts."
    if work.plan.mesh.ep > 1:
        yield (
            "The row of a token is sent once for each of its experts, also to several on one rank or node; the way to "
            "them is hidden only beside shared experts, and the way back is not."
        )
    if samples_itself(work.plan):
        yield (
            f"Each answer has {work.plan.rollout.max_new_tokens:,} tokens, beside a prompt that fills its row; rewards "
            "are not counted."
        )
    if work.plan.lora is not None:
        yield (
            "The MFU counts 4 FLOPs for each frozen parameter and token: forward and the gradients of inputs. Adapters "
            "are not counted; runs with LoRA report no perf/mfu."
        )
    yield from _left_out(work)


def _left_out(work: Work) -> Iterator[str]:
    teacher = getattr(work.plan.objective, "teacher", None)
    if teacher and teacher_config(work) is None:
        yield f"The teacher's forward is not counted: {teacher} is no folder with a config.json here."
    elif teacher:
        yield "The traffic of a partitioned teacher's weights is not counted."
    zero = work.plan.zero
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key):
            yield f"The smaller messages of zero_optimization.{key} are not counted."
    if work.plan.has_zenflow:
        yield "ZenFlow's deferred updates are not counted."
    yield "Evaluations, checkpoints, the first steps and waits for data are not counted."
