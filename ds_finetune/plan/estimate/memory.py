"""The memory of a run by arithmetic: what a rank holds on its device, in host memory and on disk, and which option
lowers it.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

from ds_finetune.config.objectives import ObjectiveConfig, is_distillation, is_grpo
from ds_finetune.config.sections import OWN_ATTENTIONS, LoraConfig
from ds_finetune.config.units import GIB
from ds_finetune.errors import ConfigError
from ds_finetune.families.family import layer_of
from ds_finetune.families.table import family_of
from ds_finetune.plan.estimate.activation_memory import ActivationBytes, AdaptedLayers, HeadBytes, activation_bytes
from ds_finetune.plan.estimate.rank_weights import (
    RankWeights,
    as_one_stage,
    lora_targets,
    rank_elements,
    remembered,
    weights_of_run,
)
from ds_finetune.plan.estimate.rollouts import samples_itself, sampling_rows
from ds_finetune.plan.estimate.rows import (
    FORWARD,
    KEPT_FOR_BACKWARD,
    MOMENTS,
    MemoryRow,
    Moment,
    Place,
    fullest_moment,
    held,
    peak,
)
from ds_finetune.plan.estimate.states import files_of, staging_bytes
from ds_finetune.plan.estimate.zero_rows import teacher_rows, zero_rows
from ds_finetune.plan.forward import CPU_TOKENS, DISTILLATION_TOKENS, head_widths, varlen_problem
from ds_finetune.plan.kernels import SINGLE
from ds_finetune.plan.model_shape import check_known
from ds_finetune.plan.model_tensors import EMBEDDING, DescribedModel
from ds_finetune.plan.pipeline import num_held_forwards
from ds_finetune.plan.plan import Plan, Recomputation
from ds_finetune.plan.tested_layouts import WEIGHT_BYTES

_WIDE = 4
_MICRO_BATCH, _LENGTH = "train.micro_batch_size", "train.max_seq_len"
EXPERT_IMBALANCE = 1.25
"""Rows that the experts of a rank get over their mean, where `parallel.ep` ranks divide the experts: assumed."""

_COMMUNICATOR, _PEER = GIB // 2, 4 * GIB // 9
"""Bytes that NCCL takes for a communicator, and for each rank of the node that exchanges rows: assumed. Others measured
388 MiB on an RTX 3060 (sglang 35538), 544 and 688 MiB on A100s (NCCL issue 964), and 3.3 GB for an exchange with seven
other H100s (NCCL issue 1685).
"""


@dataclass(frozen=True)
class MemoryEstimate:
    """What the rank that needs most on its device holds; the other ranks of its pipeline stage hold as much.

    Not all rows are held at one time: `MemoryRow.when` has the moments of a step. On CPU ranks the device is the host.
    """

    rows: tuple[MemoryRow, ...]
    stage: int
    """Pipeline stage of the rank."""
    device: Place

    @property
    def device_bytes(self) -> int:
        """Bytes on the device at the moment when most is held there."""
        return peak(self.rows, self.device)

    @property
    def moment(self) -> Moment:
        """The moment when most is held on the device."""
        return fullest_moment(self.rows, self.device)

    @property
    def host_bytes(self) -> int:
        """Bytes of a rank in host memory at most."""
        return peak(self.rows, "host")

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files of the whole run, as if all were on one disk."""
        return peak(self.rows, "disk")


def estimate_memory(plan: Plan, model: DescribedModel, *, budget: int | None = None) -> MemoryEstimate:
    """What the run of `plan` needs with its model. `budget` are the bytes of a rank's device: a run that samples
    answers fills a part of it; with None as if it had no more than steps need.

    ConfigError where the arithmetic of a model type is not known.
    """
    return fullest_stage(estimate_stages(plan, model, budget=budget))


def fullest_stage(stages: Iterable[MemoryEstimate]) -> MemoryEstimate:
    """The estimate of the stage that needs most on its device."""
    return max(stages, key=lambda estimate: estimate.device_bytes)


def estimate_stages(plan: Plan, model: DescribedModel, *, budget: int | None = None) -> Iterator[MemoryEstimate]:
    """What a rank of each pipeline stage needs, in their order; of stages that hold the same, the first alone, which
    has the most forwards in flight. Errors as those of `estimate_memory`.
    """
    check_known(model)
    stages = weights_of_run(plan, model)
    files = (*_communicator_rows(plan), *_file_rows(plan, model))
    last = tuple(_teacher_rows(plan, model.teacher))
    seen = set()
    for number, weights in enumerate(stages):
        is_last = number == len(stages) - 1
        kind = (number == 0, is_last, _held_by_stage(plan, model, weights))
        if kind in seen:
            continue
        seen.add(kind)
        # The teacher runs where the head is (engine/rank_model.py).
        others = (*last, *files) if is_last else files
        own = zero_rows(plan, rank_elements(plan, model, weights), weights)
        rows = (
            *own,
            *_fp32_rows(plan, model, weights),
            *_kept_rows(plan, weights),
            *_activation_rows(plan, model, weights, number),
            *others,
        )
        rows += tuple(_rollout_rows(plan, model, weights, rows, budget))
        yield MemoryEstimate(rows, number, _home(plan))


def _fp32_rows(plan: Plan, model: DescribedModel, weights: RankWeights) -> Iterator[MemoryRow]:
    """What forwards of DeepSeek-V4 use in fp32 (model/weights/fp32_weights.py), which every rank holds whole."""
    family = family_of(str(model["model_type"]))
    if plan.precision != "fp32" and family.fp32_weights is not None:
        size = WEIGHT_BYTES["fp32"] * sum(kind.numel for kind in weights.kinds if family.is_in_fp32(kind.name))
        yield MemoryRow("weights used in fp32", _home(plan), size, "train.precision")


def _kept_rows(plan: Plan, weights: RankWeights) -> Iterator[MemoryRow]:
    """The weights of a reference (engine/kept_weights.py), and on a GPU their copy while it is computed."""
    if is_grpo(plan.objective) and plan.objective.reference == "start":
        held = weights.numel if plan.zero_stage < 3 else sum(kind.sharded for kind in weights.kinds)
        size, option = WEIGHT_BYTES[plan.precision] * held, "objective.reference"
        yield MemoryRow("weights of the start", "host", size, option)
        if plan.device == "cuda" and plan.offload_param == "none":
            yield MemoryRow("weights of the start, in use", "gpu", size, option, ("rollout",))


def _held_by_stage(plan: Plan, model: DescribedModel, weights: RankWeights) -> Hashable:
    """What is the same of stages that need the same, but the forwards in flight."""
    return weights.kinds, _stage_activations(plan, model, weights)


class StateBytes(NamedTuple):
    """Bytes that a rank holds at least, whatever its activations are."""

    device: int
    host: int


def least_bytes_of_stages(plan: Plan, model: DescribedModel) -> StateBytes:
    """Bytes of the states of a run, with and without recomputation, whichever are fewer, however its layers are divided
    over the stages of a pipeline: on the device of the fullest stage at least, and on the host of a stage on average.
    `estimate_memory` finds as many or more; this takes a small part of its time.
    """
    merged = as_one_stage(plan)
    (weights,) = weights_of_run(merged, model)
    own = rank_elements(merged, model, weights)
    plans = [replace(merged, activation_checkpointing=each) for each in get_args(Recomputation)]
    rows = [tuple(zero_rows(each, own, weights)) for each in plans]
    # Every stage has a part of a checkpoint that is written; only the last stage has a teacher.
    others = (*(_teacher_rows(plan, model.teacher) if plan.mesh.pp == 1 else ()), *_file_rows(plan, model))
    shared = [row for row in others if row.when == MOMENTS]
    places: tuple[Place, Place] = (_home(plan), "host")
    return StateBytes(
        *(peak(shared, place) + min(peak(each, place) for each in rows) // plan.mesh.pp for place in places)
    )


def _rollout_rows(
    plan: Plan, model: DescribedModel, weights: RankWeights, others: Sequence[MemoryRow], budget: int | None
) -> Iterator[MemoryRow]:
    """Rows for answers that a rank samples beside its `others`."""
    if samples_itself(plan):
        forward = max(layer.forward for layer in _stage_activations(plan, model, weights).kinds)
        place = _home(plan)
        free = (peak(others, place) if budget is None else budget) - held(others, place, "rollout")
        yield from sampling_rows(plan, model, weights, forward=forward, free=free)


def _communicator_rows(plan: Plan) -> Iterator[MemoryRow]:
    """What NCCL takes besides torch's allocator, for all groups and the ranks that exchange rows."""
    mesh, local = plan.mesh, plan.world.local_world_size
    if plan.device == "cpu" or mesh.world_size == 1:
        return
    peers = sum(min(size, local) - 1 for size in (mesh.sp, mesh.ep))
    size = mesh.num_groups(vpp=plan.parallel.vpp) * _COMMUNICATOR + peers * _PEER
    yield MemoryRow("communicators", "gpu", size, "NCCL_MAX_NCHANNELS")


def _home(plan: Plan) -> Place:
    return "host" if plan.device == "cpu" else "gpu"


def _file_rows(plan: Plan, model: DescribedModel) -> Iterator[MemoryRow]:
    files = files_of(plan, model)
    yield MemoryRow("checkpoints", "disk", files.checkpoints * files.checkpoint_bytes, "checkpoint.keep")
    yield MemoryRow("exports", "disk", files.exports * files.export_bytes, "export.at_end")
    yield MemoryRow("a checkpoint that is written", "host", staging_bytes(plan, files), "checkpoint.asynchronous")


def _activation_rows(plan: Plan, model: DescribedModel, weights: RankWeights, number: int) -> Iterator[MemoryRow]:
    """Rows for the activations of a rank of pipeline stage `number`, with the head and the loss on the last one. All
    tokens of its rows are counted as supervised, and rows as full.
    """
    home, tokens = _home(plan), _tokens_of_rank(plan)
    own = _stage_activations(plan, model, weights)
    # Micro-batches whose activations a rank holds at a time; with `parallel.vpp` forwards run a part of its layers.
    vpp, accumulation = plan.parallel.vpp, plan.batch.gradient_accumulation_steps
    flying = num_held_forwards(pp=plan.mesh.pp, vpp=vpp, micro_batches=accumulation, rank=number) / vpp
    yield from _layer_rows(plan, own, tokens, flying=flying)
    if plan.mesh.pp > 1:
        # What each held forward gave, and one gradient.
        between = int(own.layer_input * tokens * (flying * vpp + 1))
        yield MemoryRow("hidden states between stages", home, between, _MICRO_BATCH, KEPT_FOR_BACKWARD)
    if number == plan.mesh.pp - 1:
        yield from _head_rows(plan, own, tokens)
    if number == 0 and plan.lora is None:
        (size,) = (kind.numel for kind in weights.kinds if kind.name == EMBEDDING)
        gradient = WEIGHT_BYTES[plan.precision] * size + 2 * own.layer_input * tokens
        yield MemoryRow("gradient of the embedding", home, gradient, "parallel.tp", ("embedding",))
    yield from _exchange_rows(plan, model, own, tokens)


def _tokens_of_rank(plan: Plan) -> int:
    """Tokens of a micro-batch that a rank has."""
    return plan.batch.micro_batch_size * -(-plan.batch.max_seq_len // plan.mesh.sp)


def _stage_activations(plan: Plan, model: DescribedModel, weights: RankWeights) -> ActivationBytes:
    """The activations of the layers of a pipeline stage."""
    each = _activations(plan, model, plan.mesh.tp, plan.mesh.ep, plan.lora)
    # A prediction layer is like the last layer.
    return replace(each, layers=tuple(each.layers[min(layer, len(each.layers) - 1)] for layer in weights.layers))


def _layer_rows(plan: Plan, own: ActivationBytes, tokens: int, *, flying: float) -> Iterator[MemoryRow]:
    home, is_tiled = _home(plan), plan.train.tiled_mlp
    if not plan.recomputes:
        kept, option = own.kept_by_layers(is_tiled=is_tiled) * tokens, "train.activation_checkpointing"
        yield MemoryRow("activations of layers", home, int(kept * flying), option, (*FORWARD, "head backward"))
        most = own.kept_at_most(tokens, is_tiled=is_tiled) + int(kept * max(flying - 1, 0))
        yield MemoryRow("activations and their gradients", home, most, option, ("layers",))
        return
    inputs = int(own.inputs() * tokens * flying)
    if plan.train.activation_offload:
        yield MemoryRow("inputs of recomputed layers, offloaded", "host", inputs, _MICRO_BATCH)
        inputs = own.inputs_on_device() * tokens
    option = _MICRO_BATCH if plan.train.activation_offload or plan.device == "cpu" else "train.activation_offload"
    yield MemoryRow("inputs of recomputed layers", home, inputs, option, KEPT_FOR_BACKWARD)
    is_selective = plan.activation_checkpointing == "selective"
    if is_selective:
        kept, option = int(own.kept_selectively(is_tiled=is_tiled) * tokens * flying), "train.activation_checkpointing"
        yield MemoryRow("kept outputs of recomputed layers", home, kept, option, KEPT_FOR_BACKWARD)
    forward = max(layer.forward for layer in own.kinds) * tokens
    yield MemoryRow("one layer in forward", home, forward, _MICRO_BATCH, ("forward",))
    working = own.working_set(tokens, is_tiled=is_tiled, is_selective=is_selective)
    # Tiles sum the gradients of a layer's weights in fp32, which may be more than they save.
    in_tiles = own.working_set(tokens, is_tiled=True, is_selective=is_selective)
    option = "train.tiled_mlp" if in_tiles < working else _MICRO_BATCH
    yield MemoryRow("one layer in backward", home, working, option, ("layers",))


def _exchange_rows(plan: Plan, model: DescribedModel, own: ActivationBytes, tokens: int) -> Iterator[MemoryRow]:
    home, width = _home(plan), WEIGHT_BYTES[plan.precision]
    if plan.mesh.sp > 1:
        columns = model["num_attention_heads"] // plan.mesh.tp * head_widths(model).keys
        # The queries of DeepSeek-V4 stay, and what a compressor reads of tokens is sent.
        columns = 4 * model["head_dim"] if family_of(str(model["model_type"])).compresses else columns
        # What is sent and what arrives, of one tensor at a time.
        size = 2 * width * columns * tokens
        yield MemoryRow("exchange of sequence parallelism", home, size, _LENGTH, ("forward", "layers"))
    if plan.mesh.ep > 1:
        sparse = next((layer for layer in own.layers if layer.products), None)
        assert plan.parallel.ep == plan.mesh.ep
        if sparse is not None:
            rows = width * model["hidden_size"] * int(model.get("num_experts_per_tok") or 1) * tokens
            # Rows that leave and arrive, and what their experts get beyond the mean.
            size = int(2 * rows * EXPERT_IMBALANCE + (EXPERT_IMBALANCE - 1) * sparse.mlp * tokens)
            yield MemoryRow("exchange of expert parallelism", home, size, _LENGTH, ("forward", "layers"))


def _activations(plan: Plan, model: DescribedModel, tp: int, ep: int, lora: LoraConfig | None) -> ActivationBytes:
    """The activations of a whole `model` on a rank of `tp` and `ep`, in the run's precision."""
    # Whether attention to all documents of a forward is one call.
    is_packed = (
        plan.device == "cuda"
        and plan.model.attention in OWN_ATTENTIONS
        and plan.model.attention != "by_document"
        and not varlen_problem(model, precision=plan.precision)
    )
    adapters = _adapters(model, lora) if lora is not None else None
    kernels = plan.kernels.of(family_of(str(model["model_type"])))
    return activation_bytes(
        model,
        precision=plan.precision,
        tp=tp,
        ep=ep,
        is_packed=is_packed,
        device=plan.device,
        adapters=adapters,
        kernels=kernels,
    )


@remembered
def _adapters(model: DescribedModel, lora: LoraConfig) -> AdaptedLayers:
    names = [set[str]() for _ in range(model["num_hidden_layers"])]
    for target in lora_targets(model, lora):
        number = layer_of(f"{target.name}.")
        if 0 <= number < len(names):
            names[number].add(target.name.split(f".{number}.", 1)[1])
    return AdaptedLayers(lora.rank, tuple(map(frozenset, names)))


def _head_rows(plan: Plan, own: ActivationBytes, tokens: int) -> Iterator[MemoryRow]:
    """Rows for the last norm, the head and the loss on a rank with `tokens`, all of them supervised."""
    home = _home(plan)
    head, is_frozen, width = own.head, plan.lora is not None, WEIGHT_BYTES[plan.precision]
    yield MemoryRow("last norm", home, head.by_token * tokens, _MICRO_BATCH, ("head", "head backward"))
    if plan.objective.row.head == "scores":
        return
    is_of_documents = plan.objective.row.head in ("documents", "answers")
    yield MemoryRow("hidden states of supervised tokens", home, head.by_supervised * tokens, _MICRO_BATCH, ("head",))
    logits = _logits_bytes(plan.objective, head, tokens, width)
    yield MemoryRow("logits of a chunk", home, logits, "parallel.tp", ("head",))
    gradient = 0 if is_frozen else head.gradient
    yield MemoryRow("fp32 gradient of the head", home, gradient, "parallel.tp", ("head", "head backward"))
    # The loss of documents multiplies that by its factor in a copy (model/loss/log_probs.py), the others in place.
    rounded = 0 if is_frozen else head.rounded + (head.gradient if is_of_documents else 0)
    rounded += 3 * head.by_supervised * tokens // 2
    yield MemoryRow("rounded gradient of the head", home, rounded, "parallel.tp", ("head backward",))
    if plan.device == "cpu" and width < _WIDE and not is_frozen:
        # On CPUs a product of 16-bit numbers is rounded, then made fp32 to be added.
        size = head.gradient + head.rounded
        yield MemoryRow("gradient of the head by a chunk", "host", size, "", ("head",))


def _logits_bytes(objective: ObjectiveConfig, head: HeadBytes, tokens: int, width: int) -> int:
    """The logits of a chunk of tokens and what is made of them, with what is left of the chunk before."""
    if objective.row.head == "documents":
        # Products, logits and their rounded gradient, or the gradient of the chunk before (model/loss/log_probs.py).
        chunk, is_wide = CPU_TOKENS, width == _WIDE
        one, later = (_WIDE, _WIDE) if is_wide else (2 * width + _WIDE, width + 2 * _WIDE)
    elif objective.row.head == "answers":
        # Products, and in the first pass their exponentials and what the entropy adds up.
        chunk = CPU_TOKENS
        one = later = (0 if width == _WIDE else width) + 2 * _WIDE
    elif is_distillation(objective):
        # Products and log-probabilities of the model, with a teacher its own and their exponentials, with stored scores
        # the tokens that are not stored, and a gradient (model/loss/soft_targets.py). Another temperature needs both of
        # its log-probabilities. The gradient of the chunk before is there until the next one.
        copies = (3 if objective.teacher is None else 4) + (objective.temperature != 1)
        chunk, one = DISTILLATION_TOKENS, copies * _WIDE + (0 if width == _WIDE else width)
        later = one + _WIDE
    else:
        return head.logits_of(tokens)
    return (one if tokens <= chunk else later) * min(tokens, chunk) * head.columns


def _teacher_rows(plan: Plan, teacher: DescribedModel | None) -> Iterator[MemoryRow]:
    """Rows for the teacher of a run on a rank that has the head; none where it has no teacher. ConfigError, which names
    the teacher, where the arithmetic of its model type is not known.
    """
    section = plan.objective
    if not is_distillation(section) or teacher is None:
        return
    try:
        check_known(teacher)
    except ConfigError as unknown:
        raise ConfigError(f"the teacher {section.teacher}: {unknown.message}", hint=unknown.hint) from None
    yield from teacher_rows(plan, teacher)
    home, tokens = _home(plan), _tokens_of_rank(plan)
    # The forward of one layer at a time, and hidden states until the head of the model has read them.
    activations = _activations(replace(plan, kernels=SINGLE), teacher, 1, 1, None)
    working = max(layer.forward for layer in activations.kinds) + activations.layer_input
    yield MemoryRow("one layer of the teacher", home, working * tokens, _LENGTH, ("teacher",))
    yield MemoryRow("hidden states of the teacher", home, activations.layer_input * tokens, _LENGTH, FORWARD)
