"""Estimates what a run needs, from plain numbers: parameters, memory of a rank, and disk.

`train` checks the disk with it, `plan --tensors` prints it, and `doctor` compares it with the hosts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_finetune.plan.deepspeed_config import MOMENTS
from ds_finetune.plan.plan import Plan, is_teacher_partitioned
from ds_finetune.plan.tested_layouts import WEIGHT_BYTES

_MASTER_BYTES = 4


@dataclass(frozen=True)
class TensorKind:
    """Tensors of one shape: name with `N` for the layer, count, and number of ranks among which ZeRO shards each."""

    name: str
    count: int
    whole: tuple[int, ...]
    """Shape in the whole model."""
    local: tuple[int, ...]
    """Shape on a rank, before ZeRO shards it."""
    sharers: int

    @property
    def numel(self) -> int:
        """Elements of all these tensors on a rank, before ZeRO shards them."""
        return self.count * math.prod(self.local)

    @property
    def sharded(self) -> int:
        """Elements of all these tensors on a rank, after ZeRO shards them."""
        return self.count * -(-math.prod(self.local) // self.sharers)


@dataclass(frozen=True)
class ModelSizes:
    """Parameters of a model, and of the rank that holds most parameters; adapters are counted apart."""

    total: int
    rank: int
    """Elements of the rank that holds most, before ZeRO shards them."""
    rank_sharded: int
    """Elements of that rank, after ZeRO shards them."""
    adapters: int | None = None
    """Parameters of LoRA adapters; None where every weight is trained."""
    quantised: int = 0
    """Elements that the rank that holds most has in four bits."""
    quantised_bytes: int = 0
    teacher: int = 0
    """Parameters of a teacher that runs beside the model."""
    teacher_offload: str = "none"

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.total if self.adapters is None else self.adapters


@dataclass(frozen=True)
class DiskNeed:
    """The largest number of exports and checkpoints on the disk of a host at one time, and the bytes of each."""

    exports: int
    export_bytes: int
    checkpoints: int
    checkpoint_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all exports and checkpoints."""
        return self.exports * self.export_bytes + self.checkpoints * self.checkpoint_bytes


@dataclass(frozen=True)
class RunEstimate:
    """Parameters, bytes of a rank and files of a run; activations and buffers are not counted."""

    sizes: ModelSizes
    state_bytes: Mapping[str, int]
    """Bytes of `weights`, `gradients` and `optimizer` (fp32 weights and moments) on the rank that holds most, of the
    weights of a `teacher` where there is one, of `unreduced gradients` where they are summed once a step, and of the
    `second weights` of hierarchical partitions.
    """
    places: Mapping[str, str]
    """Where a rank keeps each of them: `cuda`, `cpu` or `nvme`."""
    staging_bytes: int
    """Host memory of a rank for its part of a checkpoint that is written while training continues."""
    files: DiskNeed
    """Files of the run, counted as if all were on one disk."""
    world_size: int
    is_node_local: bool

    @property
    def gpu_bytes(self) -> int:
        """Bytes of a rank on its GPU."""
        return sum(size for name, size in self.state_bytes.items() if self.places[name] == "cuda")

    @property
    def host_bytes(self) -> int:
        """Bytes of a rank in host memory."""
        return self.staging_bytes + sum(size for name, size in self.state_bytes.items() if self.places[name] == "cpu")

    def disk(self, *, ranks: int, is_first_host: bool) -> DiskNeed:
        """The files that a host with `ranks` ranks writes to its disk.

        The first host writes the exports, and the checkpoints too where all hosts share the folder.
        """
        exports = self.files.exports if is_first_host else 0
        if not self.is_node_local:
            checkpoints = self.files.checkpoints if is_first_host else 0
            return DiskNeed(exports, self.files.export_bytes, checkpoints, self.files.checkpoint_bytes)
        share = self.files.checkpoint_bytes * ranks // self.world_size
        return DiskNeed(exports, self.files.export_bytes, self.files.checkpoints, share)


def estimate_run(plan: Plan, sizes: ModelSizes) -> RunEstimate:
    """What the run of `plan` needs with a model of `sizes`."""
    home = "cpu" if plan.device == "cpu" else "cuda"
    devices = {"weights": plan.offload_param, "gradients": plan.offload_optimizer, "optimizer": plan.offload_optimizer}
    devices |= {"teacher": sizes.teacher_offload} if sizes.teacher else {}
    devices |= {"unreduced gradients": "none"} if plan.reduces_once else {}
    devices |= {"second weights": plan.offload_param} if second_parts_of(plan) else {}
    files = _files(plan, sizes)
    return RunEstimate(
        sizes=sizes,
        state_bytes=_state_bytes(plan, sizes),
        places={name: home if device == "none" else device for name, device in devices.items()},
        staging_bytes=files.checkpoint_bytes // plan.world.world_size if plan.saves_asynchronously else 0,
        files=files,
        world_size=plan.world.world_size,
        is_node_local=plan.kept_files.is_node_local,
    )


def model_sizes(stages: Sequence[Sequence[TensorKind]]) -> ModelSizes:
    """The sizes of a model whose tensors on a rank of each pipeline stage are given."""
    fullest = fullest_stage(stages)
    # A tied weight is on both ends of a pipeline and counts once.
    total = sum(kind.count * math.prod(kind.whole) for stage in stages for kind in stage) - _copied(stages)
    return ModelSizes(total, sum(kind.numel for kind in fullest), sum(kind.sharded for kind in fullest))


def fullest_stage(stages: Sequence[Sequence[TensorKind]]) -> Sequence[TensorKind]:
    """The tensors of the stage whose ranks hold most elements."""
    return max(stages, key=lambda stage: sum(kind.numel for kind in stage))


def _copied(stages: Sequence[Sequence[TensorKind]]) -> int:
    ends = [{kind.name: math.prod(kind.whole) for kind in stage if ".layers." not in kind.name} for stage in stages]
    return sum(size for name, size in ends[-1].items() if len(stages) > 1 and name in ends[0])


def _state_bytes(plan: Plan, sizes: ModelSizes) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states on a rank.

    With LoRA only the adapters have gradients and moments."""
    width, stage = WEIGHT_BYTES[plan.precision], plan.zero_stage
    adapters = sizes.adapters or 0
    adapter_share = -(-adapters // plan.zero_ranks)
    partitions_weights = stage == 3
    weights = sizes.rank_sharded + adapter_share if partitions_weights else sizes.rank + adapters
    trained, trained_share = (sizes.rank, sizes.rank_sharded) if sizes.adapters is None else (adapters, adapter_share)
    # DeepSpeed 0.19.8 keeps a second fp32 copy of fp32 weights under ZeRO (zero/stage_1_and_2.py:560).
    copies = 1 if stage or width < _MASTER_BYTES else 0
    master = _MASTER_BYTES * (MOMENTS[plan.optimizer] + copies)
    # The packed numbers of weights in four bits are partitioned, their scales are not.
    parts = plan.zero_ranks if partitions_weights else 1
    packed = sizes.quantised // 2
    quantised_bytes = sizes.quantised_bytes - packed + -(-packed // parts)
    second_parts = second_parts_of(plan)
    teacher_parts = plan.world.world_size if is_teacher_partitioned(stage, sizes.teacher_offload) else 1
    accumulated = str((plan.deepspeed_config.get("data_types") or {}).get("grad_accum_dtype"))
    gradient_width = WEIGHT_BYTES.get(accumulated, WEIGHT_BYTES[plan.precision])
    return {
        "weights": width * (weights - sizes.quantised // parts) + quantised_bytes,
        "gradients": gradient_width * (trained_share if stage >= 2 else trained),
        **({"unreduced gradients": width * trained} if plan.reduces_once else {}),
        "optimizer": master * (trained_share if stage else trained),
        **({"teacher": width * -(-sizes.teacher // teacher_parts)} if sizes.teacher else {}),
        **({"second weights": width * -(-(sizes.rank + adapters) // second_parts)} if second_parts else {}),
    }


def second_parts_of(plan: Plan) -> int:
    """Ranks that hold a second copy of all weights together (hpZ of ZeRO++); 0 without one."""
    ranks = int(plan.zero.get("zero_hpz_partition_size", 1))
    return ranks if ranks > 1 and plan.zero_stage == 3 else 0


def _files(plan: Plan, sizes: ModelSizes) -> DiskNeed:
    kept = plan.kept_files
    return DiskNeed(
        exports=kept.exports,
        export_bytes=sizes.total * WEIGHT_BYTES[plan.precision],
        checkpoints=kept.checkpoints,
        checkpoint_bytes=sizes.trained * plan.checkpoint_bytes_per_parameter if kept.checkpoints else 0,
    )
