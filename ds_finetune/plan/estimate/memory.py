"""Memory estimate of a run: rows with what a rank holds on its device, in host memory and on disk, and the option that
lowers each row.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from ds_finetune.config.objectives import is_grpo
from ds_finetune.config.units import GIB
from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.plan.estimate.rank_weights import RankWeights, rank_elements, weights_of_run
from ds_finetune.plan.estimate.rollouts import samples_itself, sampling_rows
from ds_finetune.plan.estimate.rows import (
    KEPT_FOR_BACKWARD,
    MemoryRow,
    Moment,
    Place,
    fullest_moment,
    held,
    peak,
)
from ds_finetune.plan.estimate.states import files_of, staging_bytes
from ds_finetune.plan.estimate.traced import TracedLayer, TracedModel, Tracer
from ds_finetune.plan.estimate.zero_rows import teacher_rows, zero_rows
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.pipeline import num_forwards_in_flight
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.tested_layouts import WEIGHT_BYTES

_MICRO_BATCH, _LENGTH = "train.micro_batch_size", "train.max_seq_len"
_COMMUNICATOR, _PEER = GIB // 2, 4 * GIB // 9
"""Assumed bytes of an NCCL communicator, and of each rank on the node with which rows are exchanged. Reported: 388 MiB
on an RTX 3060 (sglang 35538), 544 and 688 MiB on A100s (NCCL issue 964), and 3.3 GB for an exchange with seven other
H100s (NCCL issue 1685).
"""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of the rank with the highest peak on its device. Other ranks of its pipeline stage need as much.

    The rows are held at different moments of a step (`MemoryRow.when`). The device of a CPU rank is the host.
    """

    rows: tuple[MemoryRow, ...]
    stage: int
    """Pipeline stage of the rank."""
    device: Place

    @property
    def device_bytes(self) -> int:
        """Peak bytes on the device."""
        return peak(self.rows, self.device)

    @property
    def moment(self) -> Moment:
        """The moment of a step in which the device holds most bytes."""
        return fullest_moment(self.rows, self.device)

    @property
    def host_bytes(self) -> int:
        """Peak bytes of a rank in host memory."""
        return peak(self.rows, "host")

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files of the run, counted as if all hosts had one disk."""
        return peak(self.rows, "disk")


def estimate_memory(plan: Plan, model: DescribedModel, traces: Tracer, *, budget: int | None = None) -> MemoryEstimate:
    """Memory that the run of `plan` needs; `traces` gives the activations of its model. `budget` is the size in bytes
    of a rank's device, a part of which sampling of answers fills; None assumes no more than training steps need.

    ModelError where the traced layers do not match the layers of the model's tensors.
    """
    stages = estimate_stages(plan, model, traces, budget=budget)
    return max(stages, key=lambda estimate: estimate.device_bytes)


def estimate_stages(
    plan: Plan, model: DescribedModel, traces: Tracer, *, budget: int | None = None
) -> Iterator[MemoryEstimate]:
    """Memory of a rank of each pipeline stage, in order. Of stages with equal layers and tensors only the first is
    estimated, because it holds activations of the most micro-batches. Errors as in `estimate_memory`.
    """
    stages, traced = weights_of_run(plan, model), traces(plan)
    expected, computed = len(model.tensors.layers) - model.tensors.num_predictions, len(traced.layers)
    if expected != computed:
        raise ModelError(
            f"the memory of model_type {model['model_type']} is not known: its tensors are those of {expected} layers, "
            f"and {computed} were computed",
            hint="the run may train all the same: its memory is known after a short run",
        )
    files = (*_communicator_rows(plan), *_file_rows(plan, model))
    last = tuple(teacher_rows(plan, model.teacher))
    seen = set()
    for number, weights in enumerate(stages):
        is_last = number == len(stages) - 1
        layers = traced.layers_of(weights.layers)
        kind: Hashable = (number == 0, is_last, weights.kinds, layers)
        if kind in seen:
            continue
        seen.add(kind)
        # The teacher of a distillation runs on the last pipeline stage, which has the head (engine/rank_model.py).
        others = (*last, *files) if is_last else files
        own = zero_rows(plan, rank_elements(plan, model, weights), weights)
        rows = (
            *own,
            *_kept_rows(plan, model, weights),
            *_activation_rows(plan, traced, layers, number),
            *others,
        )
        rows += tuple(_rollout_rows(plan, model, weights, rows, budget, traces))
        yield MemoryEstimate(rows, number, plan.home)


def _kept_rows(plan: Plan, model: DescribedModel, weights: RankWeights) -> Iterator[MemoryRow]:
    """Rows for weights that this program holds beside DeepSpeed: weights of DeepSeek-V4 that forwards use in fp32,
    replicated on every rank (model/weights/fp32_weights.py), and weights of the reference model
    (`KeptWeights`), on a GPU with their copy while they are used.
    """
    family = family_of(str(model["model_type"]))
    if plan.precision != "fp32" and family.fp32_weights is not None:
        size = WEIGHT_BYTES["fp32"] * sum(kind.numel for kind in weights.kinds if family.is_in_fp32(kind.name))
        yield MemoryRow("weights used in fp32", plan.home, size, "train.precision")
    if is_grpo(plan.objective) and plan.objective.reference == "start":
        numel = weights.numel if plan.zero_stage < 3 else weights.sharded
        size, option = plan.weight_bytes * numel, "objective.reference"
        yield MemoryRow("weights of the start", "host", size, option)
        if plan.device == "cuda" and plan.offload_param == "none":
            yield MemoryRow("weights of the start, in use", "gpu", size, option, ("rollout",))


def _rollout_rows(  # noqa: PLR0913 - what a rank holds, and what it knows of its device and layers
    plan: Plan,
    model: DescribedModel,
    weights: RankWeights,
    others: Sequence[MemoryRow],
    budget: int | None,
    traces: Tracer,
) -> Iterator[MemoryRow]:
    """Memory rows for sampling answers on a rank; `others` are its rows of training."""
    if samples_itself(plan):
        # With full recomputation the traced forward of layers runs without gradients, as it does while answers are
        # sampled.
        layers = traces(plan.with_recomputation("full")).layers_of(weights.layers)
        forward = max(layer.forward for layer in layers) // (
            plan.micro_batch_size * -(-plan.train.max_seq_len // plan.mesh.sp)
        )
        place = plan.home
        free = (peak(others, place) if budget is None else budget) - held(others, place, "rollout")
        yield from sampling_rows(plan, model, weights, forward=forward, free=free)


def _communicator_rows(plan: Plan) -> Iterator[MemoryRow]:
    """Memory of NCCL outside torch's allocator, for all communicators and the ranks that exchange rows."""
    mesh, local = plan.mesh, plan.world.local_world_size
    if plan.device == "cpu" or mesh.world_size == 1:
        return
    peers = sum(min(size, local) - 1 for size in (mesh.sp, mesh.ep))
    size = mesh.num_groups(vpp=plan.parallel.vpp) * _COMMUNICATOR + peers * _PEER
    yield MemoryRow("communicators", "gpu", size, "NCCL_MAX_NCHANNELS")


def _file_rows(plan: Plan, model: DescribedModel) -> Iterator[MemoryRow]:
    files = files_of(plan, model)
    yield MemoryRow("checkpoints", "disk", files.checkpoints * files.checkpoint_bytes, "checkpoint.keep")
    yield MemoryRow("exports", "disk", files.exports * files.export_bytes, "export.at_end")
    yield MemoryRow("a checkpoint that is written", "host", staging_bytes(plan, files), "checkpoint.asynchronous")


def _activation_rows(
    plan: Plan, traced: TracedModel, layers: Sequence[TracedLayer], number: int
) -> Iterator[MemoryRow]:
    """Rows for activations of a rank of pipeline stage `number`, with head and loss on the last stage. All tokens are
    assumed to be supervised, and all rows full.
    """
    home = plan.home
    # Number of micro-batches whose activations a rank holds; with `parallel.vpp`, a forward covers only a part of its
    # layers.
    vpp, accumulation = plan.parallel.vpp, plan.accumulation
    in_flight = num_forwards_in_flight(pp=plan.mesh.pp, vpp=vpp, micro_batches=accumulation, rank=number) / vpp
    if on_host := sum(layer.on_host for layer in layers):
        yield MemoryRow("inputs of recomputed layers, offloaded", "host", int(on_host * in_flight), _MICRO_BATCH)
    kept, own = traced.before + int(sum(layer.kept for layer in layers) * in_flight), traced.kept(layers)
    yield MemoryRow("kept by layers", home, kept, _lowers_kept(plan), KEPT_FOR_BACKWARD)
    forward = max(traced.forward_peak(layers), traced.embedding if number == 0 else 0) - own
    yield MemoryRow("one layer in forward", home, max(0, forward), _MICRO_BATCH, ("forward",))
    option = _MICRO_BATCH if plan.train.tiled_mlp else "train.tiled_mlp"
    backward = max(0, traced.backward_peak(layers) - own)
    yield MemoryRow("one layer in backward", home, backward, option, ("layers",))
    if plan.mesh.pp > 1:
        # Each micro-batch in flight holds the output of its stage, and one gradient is received.
        between = int(traced.hidden * (in_flight * vpp + 1))
        yield MemoryRow("hidden states between stages", home, between, _MICRO_BATCH, KEPT_FOR_BACKWARD)
    if number == plan.mesh.pp - 1:
        yield MemoryRow("head and loss", home, traced.head, "parallel.tp", ("head",))
        yield MemoryRow("backward of the head", home, traced.head_backward, "parallel.tp", ("head backward",))
        if traced.teacher:
            yield MemoryRow("forward of the teacher", home, traced.teacher, _LENGTH, ("teacher",))
    if number == 0:
        yield MemoryRow("gradient of the embedding", home, traced.embedding_backward, "parallel.tp", ("embedding",))


def _lowers_kept(plan: Plan) -> str:
    if plan.activation_checkpointing != "full":
        return "train.activation_checkpointing"
    return _MICRO_BATCH if plan.train.activation_offload or plan.device == "cpu" else "train.activation_offload"
