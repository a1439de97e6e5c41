"""What a run needs beside activations: states of a rank, host memory and disk.

`train` checks the disk with it, `plan --tensors` prints it, and `doctor` compares it with the hosts.
"""

from dataclasses import dataclass

from ds_finetune.plan.estimate.rank_weights import count_adapters, rank_elements, weights_of_run
from ds_finetune.plan.estimate.rows import MemoryRow, peak
from ds_finetune.plan.estimate.zero_rows import teacher_rows, zero_rows
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.tested_layouts import WEIGHT_BYTES


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
    """Parameters, states of a rank and files of a run; activations are not counted."""

    total: int
    """Parameters of the model, without adapters."""
    rank: int
    """Elements of a rank of the pipeline stage that holds most, before ZeRO shards them."""
    stage: int
    """The number of that stage."""
    rows: tuple[MemoryRow, ...]
    """What a rank of it holds for DeepSpeed, and the weights of a teacher."""
    staging_bytes: int
    """Host memory of a rank for its part of a checkpoint that is written while training continues."""
    files: DiskNeed
    """Files of the run, counted as if all were on one disk."""
    world_size: int
    is_node_local: bool

    @property
    def gpu_bytes(self) -> int:
        """Bytes of a rank on its GPU at most."""
        return peak(self.rows, "gpu")

    @property
    def host_bytes(self) -> int:
        """Bytes of a rank in host memory at most."""
        return self.staging_bytes + peak(self.rows, "host")

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


def estimate_run(plan: Plan, model: DescribedModel) -> RunEstimate:
    """What the run of `plan` needs with its model."""
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
        is_node_local=plan.kept_files.is_node_local,
    )


def staging_bytes(plan: Plan, files: DiskNeed) -> int:
    """Host memory of a rank for its part of a checkpoint that is written while training continues."""
    return files.checkpoint_bytes // plan.world.world_size if plan.saves_asynchronously else 0


def files_of(plan: Plan, model: DescribedModel) -> DiskNeed:
    """The files of a run."""
    kept, total = plan.kept_files, model.tensors.numel
    trained = total if plan.lora is None else count_adapters(plan, model)
    return DiskNeed(
        exports=kept.exports,
        export_bytes=total * WEIGHT_BYTES[plan.precision],
        checkpoints=kept.checkpoints,
        checkpoint_bytes=trained * plan.checkpoint_bytes_per_parameter if kept.checkpoints else 0,
    )
