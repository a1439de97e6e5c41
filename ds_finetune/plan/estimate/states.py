"""Memory and disk space that a run needs besides activations: DeepSpeed's states on a rank, host memory, and files.

`train` compares the size of the files with the free disk space. `plan --tensors` prints the estimate, and `doctor`
compares it with the memory and disks of hosts.
"""

from dataclasses import dataclass

from ds_finetune.config.objectives import is_grpo
from ds_finetune.plan.estimate.rank_weights import count_adapters, rank_elements, weights_of_run
from ds_finetune.plan.estimate.zero_rows import MemoryRow, peak, teacher_rows, zero_rows
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.trained_parts import plan_freezing


@dataclass(frozen=True)
class DiskNeed:
    """Maximum number of exports and checkpoints on a host's disk at the same time, and the bytes of each."""

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
    """Parameters, states of a rank and files of a run, without activations."""

    total: int
    """Parameters of the model, without adapters."""
    rank: int
    """Elements on a rank of the largest pipeline stage, before ZeRO shards them."""
    stage: int
    """Index of the largest pipeline stage, from 0."""
    rows: tuple[MemoryRow, ...]
    """Memory rows for DeepSpeed's states on a rank of the largest pipeline stage, and for the weights of a teacher."""
    staging_bytes: int
    """Bytes of host memory on a rank for its part of an asynchronous checkpoint."""
    files: DiskNeed
    """Files of the run, counted as if all were on one disk."""
    world_size: int
    is_node_local: bool

    @property
    def gpu_bytes(self) -> int:
        """Peak bytes of a rank on its GPU."""
        return peak(self.rows, "gpu")

    @property
    def host_bytes(self) -> int:
        """Peak bytes of a rank in host memory."""
        return self.staging_bytes + peak(self.rows, "host")

    def disk(self, *, ranks: int, is_first_host: bool) -> DiskNeed:
        """Disk space that a host with `ranks` ranks needs.

        The first host writes the exports. If all hosts share the folder, it also writes the checkpoints.
        """
        exports = self.files.exports if is_first_host else 0
        if not self.is_node_local:
            checkpoints = self.files.checkpoints if is_first_host else 0
            return DiskNeed(exports, self.files.export_bytes, checkpoints, self.files.checkpoint_bytes)
        checkpoint_bytes = self.files.checkpoint_bytes * ranks // self.world_size
        return DiskNeed(exports, self.files.export_bytes, self.files.checkpoints, checkpoint_bytes)


def estimate_run(plan: Plan, model: DescribedModel) -> RunEstimate:
    """Parameters, states and files of the run of `plan` with its model."""
    stage, weights = max(enumerate(weights_of_run(plan, model)), key=lambda each: each[1].numel)
    files = files_of(plan, model)
    return RunEstimate(
        total=model.tensors.numel,
        rank=weights.numel,
        stage=stage,
        rows=(*zero_rows(plan, rank_elements(plan, model, weights), weights), *teacher_rows(plan, model.teacher)),
        staging_bytes=staging_bytes(plan, files),
        files=files,
        world_size=plan.world.world_size,
        is_node_local=plan.checkpoint.node_local,
    )


def staging_bytes(plan: Plan, files: DiskNeed) -> int:
    """Bytes of host memory on a rank for its part of an asynchronous checkpoint; 0 for synchronous ones."""
    return files.checkpoint_bytes // plan.world.world_size if plan.saves_asynchronously else 0


def files_of(plan: Plan, model: DescribedModel) -> DiskNeed:
    """Number and bytes of a run's exports and checkpoints."""
    checkpoint, has_best, total = plan.checkpoint, bool(plan.data.eval), model.tensors.numel
    # A new checkpoint is complete before the oldest is removed.
    checkpoints = checkpoint.keep + 1 + (checkpoint.keep_best and has_best) if checkpoint.saves else 0
    # The export that a server loads during training is removed before the final one is written.
    is_served = is_grpo(plan.objective) and plan.rollout.engine == "vllm"
    trained = total if plan.lora is None else count_adapters(plan, model)
    if freezing := plan_freezing(plan.train, model.tensors.by_name):
        trained = sum(tensor.numel for tensor in freezing.trained.values())
    return DiskNeed(
        exports=(plan.export.at_end or is_served) + (plan.eval.keep_best and has_best),
        export_bytes=total * plan.weight_bytes,
        checkpoints=checkpoints,
        checkpoint_bytes=int(trained * plan.checkpoint_bytes_per_parameter) if checkpoints else 0,
    )
