"""Memory estimate of a run: rows that say how many bytes a rank holds on its device, in host memory and on disk, and
which option reduces them. `train` compares the size of the files with the free disk space. `plan --tensors` prints the
estimate, and `doctor` compares it with the memory and disks of hosts.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ds_finetune.config.objectives import GrpoObjective, is_grpo
from ds_finetune.config.units import GIB
from ds_finetune.errors import ModelError
from ds_finetune.plan.batch import num_forwards_in_flight
from ds_finetune.plan.estimate.traced import TracedLayer, TracedModel, Tracer
from ds_finetune.plan.estimate.zero_rows import (
    KEPT_FOR_BACKWARD,
    FetchingRules,
    MemoryRow,
    Moment,
    Place,
    fullest_moment,
    gathered_weights,
    held,
    num_persistent,
    peak,
    rank_elements,
    teacher_rows,
    zero_rows,
)
from ds_finetune.plan.forward import PROMPT_TOKENS, WEIGHTS_SHARE, head_widths, rows_of_batch, rows_sampled_at_once
from ds_finetune.plan.layer_stages import RankWeights, rank_weights
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.precision import WEIGHT_BYTES
from ds_finetune.plan.trained_parts import TrainedTensors, trained_tensors

_MICRO_BATCH, _LENGTH, _ANSWERS = "train.micro_batch_size", "train.max_seq_len", "rollout.batch_rows"
_WIDE = WEIGHT_BYTES["fp32"]
_DRAWING_BYTES = 30
"""Bytes per logit while the random numbers of sampling are computed (engine/sampling/noise.py)."""
_COMMUNICATOR, _PEER = GIB // 2, 4 * GIB // 9
"""Assumed bytes of an NCCL communicator, and of its buffers for all-to-all with one other rank of the node. Reported:
388 MiB on an RTX 3060 (sglang 35538), 544 and 688 MiB on A100s (NCCL issue 964), and 3.3 GB for an exchange with seven
other H100s (NCCL issue 1685).
"""


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory of the rank with the highest peak on its device. Other ranks of its pipeline stage need as much.

    Each memory row is held at certain moments of a step (`MemoryRow.when`). The device of a CPU rank is the host.
    """

    rows: tuple[MemoryRow, ...]
    stage: int
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
        """Bytes of all files of the run, counted as if all hosts shared one disk."""
        return peak(self.rows, "disk")


@dataclass(frozen=True)
class DiskNeed:
    """Maximum number of exports and checkpoints on a host's disk at the same time, and the bytes of each."""

    exports: int
    export_bytes: int
    checkpoints: int
    checkpoint_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all exports and checkpoints on the host's disk."""
        return self.exports * self.export_bytes + self.checkpoints * self.checkpoint_bytes

    def of_host(self, plan: Plan, *, ranks: int, is_first_host: bool) -> "DiskNeed":
        """Disk space that a host needs for `ranks` of the run's ranks.

        The first host writes the exports. If all hosts share the folder, the first host also writes all checkpoints.
        """
        exports = self.exports if is_first_host else 0
        if not plan.checkpoint.node_local:
            return replace(self, exports=exports, checkpoints=self.checkpoints if is_first_host else 0)
        return replace(self, exports=exports, checkpoint_bytes=self.checkpoint_bytes * ranks // plan.world.world_size)


@dataclass(frozen=True)
class RunMemory:
    """Memory and files of the run of `plan`, from the tensors of its model, and activations by `traces`."""

    plan: Plan
    model: DescribedModel
    traces: Tracer
    budget: int | None = None
    """Memory of a rank's device in bytes, of which sampling of answers takes a part. With None sampling takes no more
    memory than training steps.
    """

    @cached_property
    def weights(self) -> tuple[RankWeights, ...]:
        """For each pipeline stage, the tensors that one of its ranks holds."""
        return rank_weights(self.model, self.plan.parallel, zero_ranks=self.plan.zero_ranks)

    @property
    def trained(self) -> TrainedTensors:
        """The tensors that the run trains."""
        plan, train = self.plan, self.plan.train
        return trained_tensors(self.model, (train.only, train.freeze), plan.lora, plan.router, plan.indexer)

    @property
    def files(self) -> DiskNeed:
        """Number and bytes of the run's exports and checkpoints."""
        plan, checkpoint, has_best = self.plan, self.plan.checkpoint, bool(self.plan.data.eval)
        # A new checkpoint is complete before the oldest is removed.
        checkpoints = checkpoint.keep + 1 + (checkpoint.keep_best and has_best) if checkpoint.saves else 0
        # The export that a server loads during training is removed before the final one is written.
        is_served = is_grpo(plan.objective) and plan.rollout.engine == "vllm"
        return DiskNeed(
            exports=(plan.export.at_end or is_served) + (plan.eval.keep_best and has_best),
            export_bytes=self.model.tensors.numel * plan.weight_bytes,
            checkpoints=checkpoints,
            checkpoint_bytes=int(self.trained.num_saved * plan.checkpoint_bytes_per_parameter) if checkpoints else 0,
        )

    def estimate(self) -> MemoryEstimate:
        """Memory of the rank with the highest peak on its device. Raises the errors of `stages`."""
        return max(self.stages(), key=lambda estimate: estimate.device_bytes)

    def with_plan(self, plan: Plan) -> "RunMemory":
        """Memory of the run if it had this plan, which may differ in all but the model."""
        return replace(self, plan=plan)

    def bytes_of(self, rows: int) -> int:
        """Peak bytes on a rank's device if the run had micro-batches of `rows` rows."""
        return self.with_plan(self.plan.with_rows(rows)).estimate().device_bytes

    def stages(self) -> Iterator[MemoryEstimate]:
        """Memory of a rank of each pipeline stage, in order. Among middle stages with equal layers and tensors only the
        first is estimated, because it holds activations of the most micro-batches.

        ModelError if the traced layers do not match the layers of the model's tensors.
        """
        plan, tensors, traced = self.plan, self.model.tensors, self.traces(self.plan)
        expected, computed = len(tensors.layers) - tensors.num_predictions, len(traced.layers)
        if expected != computed:
            raise ModelError(
                f"the memory of model_type {self.model['model_type']} cannot be estimated: it has tensors of "
                f"{expected} layers, but its traced forward has {computed}",
                hint="train a few steps to measure the memory",
            )
        files = (*_communicator_rows(plan), *self._file_rows())
        last = tuple(teacher_rows(plan, self.model.teacher))
        seen = set()
        for number, weights in enumerate(self.weights):
            rank = _Rank(plan, self.model, number, weights, traced)
            kind: Hashable = (number == 0, rank.is_last, weights.kinds, rank.layers)
            if kind in seen:
                continue
            seen.add(kind)
            # The teacher of a distillation runs on the last pipeline stage, which has the head (engine/rank_model.py).
            others = (*last, *files) if rank.is_last else files
            states = zero_rows(plan, rank_elements(plan, self.trained, weights))
            rows = (*states, *rank.kept_rows(), *rank.activation_rows(), *others)
            yield MemoryEstimate((*rows, *self._rollout_rows(rank, rows)), number, plan.home)

    def _file_rows(self) -> Iterator[MemoryRow]:
        plan, files = self.plan, self.files
        yield MemoryRow("checkpoints", "disk", files.checkpoints * files.checkpoint_bytes, "checkpoint.keep")
        yield MemoryRow("exports", "disk", files.exports * files.export_bytes, "export.at_end")
        part = files.checkpoint_bytes // plan.world.world_size if plan.saves_asynchronously else 0
        yield MemoryRow("a checkpoint that is written", "host", part, "checkpoint.asynchronous")

    def _rollout_rows(self, rank: "_Rank", others: Sequence[MemoryRow]) -> Iterator[MemoryRow]:
        plan, place = self.plan, self.plan.home
        if plan.objective.row.head != "answers" or plan.rollout.engine != "own":
            return
        # With full recomputation the traced forward of layers runs without gradients, as it does while answers are
        # sampled.
        layers = self.traces(plan.with_recomputation("full")).layers_of(rank.weights.layers)
        tokens = plan.micro_batch_size * -(-plan.train.max_seq_len // plan.mesh.sp)
        forward = max(layer.forward for layer in layers) // tokens
        free = (peak(others, place) if self.budget is None else self.budget) - held(others, place, "rollout")
        yield from rank.sampling_rows(forward=forward, free=free)


def _communicator_rows(plan: Plan) -> Iterator[MemoryRow]:
    """Memory row for NCCL's own buffers, which torch's allocator does not count: those of communicators, and those for
    exchanges with other ranks of a node.
    """
    mesh, local = plan.mesh, plan.world.local_world_size
    if plan.device == "cpu" or mesh.world_size == 1:
        return
    peers = sum(min(size, local) - 1 for size in (mesh.sp, mesh.ep))
    size = mesh.num_groups(vpp=plan.parallel.vpp) * _COMMUNICATOR + peers * _PEER
    yield MemoryRow("communicators", "gpu", size, "NCCL_MAX_NCHANNELS")


@dataclass(frozen=True)
class _Rank:
    """A rank of pipeline stage `number`, with its tensors, and traced activations of a rank with all layers."""

    plan: Plan
    model: DescribedModel
    number: int
    weights: RankWeights
    traced: TracedModel

    @property
    def is_last(self) -> bool:
        return self.number == self.plan.mesh.pp - 1

    @property
    def layers(self) -> tuple[TracedLayer, ...]:
        return self.traced.layers_of(self.weights.layers)

    def kept_rows(self) -> Iterator[MemoryRow]:
        """Memory rows for weights that this program holds in addition to DeepSpeed's.

        One row is for DeepSeek-V4: every rank holds full fp32 copies of some weights (model/weights/fp32_weights.py).
        Two rows are for weights of the reference model (`KeptWeights`): in host memory, and on a GPU while they are in
        use, unless weights are offloaded.
        """
        plan, weights, family = self.plan, self.weights, self.model.family
        if plan.precision != "fp32" and family.fp32_weights is not None:
            size = WEIGHT_BYTES["fp32"] * sum(kind.numel for kind in weights.kinds if family.is_in_fp32(kind.name))
            yield MemoryRow("weights used in fp32", plan.home, size, "train.precision")
        if is_grpo(plan.objective) and plan.objective.reference == "start":
            numel = weights.numel if plan.zero_stage < 3 else weights.sharded
            size, option = plan.weight_bytes * numel, "objective.reference"
            yield MemoryRow("weights of the start", "host", size, option)
            if plan.device == "cuda" and plan.offload_param == "none":
                yield MemoryRow("weights of the start, in use", "gpu", size, option, ("rollout",))

    def activation_rows(self) -> Iterator[MemoryRow]:
        """Memory rows for activations, for rows without padding and a loss on all tokens. The last stage also has the
        head and the loss.
        """
        plan, traced, layers, number, home = self.plan, self.traced, self.layers, self.number, self.plan.home
        # `in_flight` counts micro-batches whose activations a rank holds. With `parallel.vpp`, one forward covers only
        # 1 / vpp of the rank's layers.
        vpp, accumulation = plan.parallel.vpp, plan.accumulation
        in_flight = num_forwards_in_flight(pp=plan.mesh.pp, vpp=vpp, micro_batches=accumulation, rank=number) / vpp
        if on_host := sum(layer.on_host for layer in layers):
            yield MemoryRow("inputs of recomputed layers, offloaded", "host", int(on_host * in_flight), _MICRO_BATCH)
        kept, own = traced.before + int(sum(layer.kept for layer in layers) * in_flight), traced.kept(layers)
        option = _MICRO_BATCH if plan.train.activation_offload or plan.device == "cpu" else "train.activation_offload"
        option = option if plan.activation_checkpointing == "full" else "train.activation_checkpointing"
        yield MemoryRow("kept by layers", home, kept, option, KEPT_FOR_BACKWARD)
        forward = max(traced.forward_peak(layers), traced.embedding if number == 0 else 0) - own
        yield MemoryRow("one layer in forward", home, max(0, forward), _MICRO_BATCH, ("forward",))
        option = _MICRO_BATCH if plan.train.tiled_mlp else "train.tiled_mlp"
        backward = max(0, traced.backward_peak(layers) - own)
        yield MemoryRow("one layer in backward", home, backward, option, ("layers",))
        if plan.mesh.pp > 1:
            # Each micro-batch in flight holds the output of its pipeline stage, and the rank receives one gradient of
            # such an output.
            between = int(traced.hidden * (in_flight * vpp + 1))
            yield MemoryRow("hidden states between stages", home, between, _MICRO_BATCH, KEPT_FOR_BACKWARD)
        if self.is_last:
            yield MemoryRow("head and loss", home, traced.head, "parallel.tp", ("head",))
            yield MemoryRow("backward of the head", home, traced.head_backward, "parallel.tp", ("head backward",))
            if traced.teacher:
                yield MemoryRow("forward of the teacher", home, traced.teacher, _LENGTH, ("teacher",))
        if number == 0:
            yield MemoryRow("gradient of the embedding", home, traced.embedding_backward, "parallel.tp", ("embedding",))

    def sampling_rows(self, *, forward: int, free: float) -> Iterator[MemoryRow]:
        """Memory rows for sampling answers, on a rank whose device has `free` bytes free between steps.

        `forward` is the peak of bytes per token in the forward of one layer.
        """
        plan, weights, vocabulary = self.plan, self.weights, self.model["vocab_size"]
        assert isinstance(plan.objective, GrpoObjective)
        group_size, home, width = plan.objective.group_size, plan.home, plan.weight_bytes
        if plan.zero_stage == 3 and plan.zero_ranks > 1:
            rules = FetchingRules.of(plan.zero)
            # ZeRO-3 weights that fit into free memory are gathered once for all answers. Otherwise they are gathered
            # again for each token.
            if plan.offload_param == "none" and width * weights.numel <= WEIGHTS_SHARE * free:
                free -= width * weights.numel
                gathered = max(weights.numel - weights.sharded - num_persistent(weights.kinds, rules), 0)
                yield MemoryRow("whole weights, rollout", home, width * gathered, "", ("rollout",))
            else:
                fetched = [kind for kind in weights.kinds if kind.sharers > 1 or plan.offload_param != "none"]
                most, *_ = gathered_weights(fetched, rules, passes=1, home=home)
                size = width * (most.numel + most.arriving)
                yield MemoryRow("gathered weights, rollout", home, size, "", ("rollout",))
        token_bytes, rows = width * self._cached_numbers(), plan.rollout.batch_rows
        if rows == "auto":
            rows = rows_of_batch(free, tokens=plan.train.max_seq_len, token_bytes=token_bytes, vocabulary=vocabulary)
        if rows >= group_size:
            # Sampling computes all answers to a prompt in one batch, and all batches have equal sizes
            # (engine/sampling/sampler.py).
            prompts = -(-plan.rollout.prompts_per_step * plan.rollout.steps_per_rollout // plan.zero_ranks)
            rows = group_size * -(-prompts // -(-prompts // (rows // group_size)))
        cache, logits = rows * plan.train.max_seq_len * token_bytes, rows * vocabulary
        yield MemoryRow("keys and values of answers", home, cache, _ANSWERS, ("rollout",))
        drawing = _DRAWING_BYTES * vocabulary * min(rows, rows_sampled_at_once(plan.device, vocabulary=vocabulary))
        # Sampling holds the logits of the previous token until it has computed those of the next token.
        work = _WIDE * logits + max(drawing, (_WIDE if width == _WIDE else width + _WIDE) * logits)
        longest = max(1, plan.train.max_seq_len - plan.rollout.max_new_tokens)
        tokens = min(max(PROMPT_TOKENS // longest, 1), -(-rows // group_size)) * longest
        prompt_bytes = tokens * (token_bytes + forward) + _WIDE * logits
        # When sampling adds columns or drops rows, it copies the key-value cache layer by layer
        # (engine/sampling/row_cache.py).
        copied = cache // len(weights.layers)
        yield MemoryRow("forwards of answers", home, max(work, prompt_bytes, copied), _ANSWERS, ("rollout",))

    def _cached_numbers(self) -> int:
        """Numbers of keys and values that a rank's layers cache for a token."""
        model, tp = self.model, self.plan.mesh.tp
        layers = [model.tensors.layers[number] for number in self.weights.layers]
        heads = int(model.get("num_key_value_heads") or model["num_attention_heads"])
        each = sum(head_widths(model)) * -(-heads // tp)
        if (rank := model.get("kv_lora_rank")) is not None:
            each = rank + model["qk_rope_head_dim"]
        chosen = sum(kind.has_indexer for kind in layers)
        return int(each * len(layers) + chosen * (model.get("index_head_dim") or 0))
