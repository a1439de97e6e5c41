"""The memory of a run by arithmetic: what a rank holds on its device, in host memory and on disk, and which option
lowers it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_finetune.config.schema import RunConfig
from ds_finetune.estimate.activation_rows import activation_rows
from ds_finetune.estimate.rank_elements import count_adapters, rank_elements
from ds_finetune.estimate.rank_weights import RankWeights, num_scores, weights_of_run
from ds_finetune.estimate.rows import MemoryRow, Moment, Place, fullest_moment, peak
from ds_finetune.estimate.states import ModelSizes, estimate_run
from ds_finetune.estimate.teacher_rows import teacher_rows
from ds_finetune.estimate.zero_rows import zero_rows
from ds_finetune.families.parameters import ModelConfig
from ds_finetune.plan.model_shape import Shape
from ds_finetune.plan.plan import Plan


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


def estimate_memory(
    config: RunConfig, plan: Plan, model: ModelConfig, *, teacher: ModelConfig | None = None
) -> MemoryEstimate:
    """What the run of `config` needs with the layout of `plan`, where `model` is the config.json of its model, and
    `teacher` that of a teacher, which is read from its folder where it is not given.

    ConfigError where the arithmetic of a model type is not known; ModelError where the teacher's folder is not here.
    """
    device: Place = "host" if plan.device == "cpu" else "gpu"
    stages = weights_of_run(config, plan, model)
    files, last = tuple(_file_rows(config, plan, model)), tuple(teacher_rows(config, plan, teacher))
    found = []
    for number in range(len(stages)):
        # The teacher runs where the head is (engine/teacher.py).
        others = (*last, *files) if number == len(stages) - 1 else files
        found.append(MemoryEstimate((*_rows(config, plan, model, stages, number), *others), number, device))
    return max(found, key=lambda estimate: estimate.device_bytes)


class StateBytes(NamedTuple):
    """Bytes that a rank holds at least, whatever its activations are."""

    device: int
    host: int


def least_bytes(config: RunConfig, plan: Plan, model: ModelConfig) -> StateBytes:
    """Bytes of the states of a run, with and without recomputation, whichever are fewer: `estimate_memory` finds as
    many on the device and on the host or more. It takes a small part of the time.
    """
    home: Place = "host" if plan.device == "cpu" else "gpu"
    plans = [replace(plan, activation_checkpointing=recomputes) for recomputes in (False, True)]
    found = []
    for weights in weights_of_run(config, plan, model):
        own = rank_elements(config, plan, model, weights)
        rows = [tuple(zero_rows(each, own, weights)) for each in plans]
        found.append(StateBytes(*(min(peak(each, place) for each in rows) for place in (home, "host"))))
    # Which stage is the fullest depends on activations too: of the host, the least of all stages is certain.
    return StateBytes(max(each.device for each in found), min(each.host for each in found))


def _rows(
    config: RunConfig, plan: Plan, model: ModelConfig, stages: tuple[RankWeights, ...], number: int
) -> Iterator[MemoryRow]:
    own = rank_elements(config, plan, model, stages[number])
    yield from zero_rows(plan, own, stages[number])
    yield from activation_rows(config, plan, model, stages, number)


def _file_rows(config: RunConfig, plan: Plan, model: ModelConfig) -> Iterator[MemoryRow]:
    shape = Shape.of(model, mtp_layers=1 if config.mtp.train else 0)
    scores = num_scores(config)
    total = (shape.with_scores(scores) if scores else shape).total_params
    adapters = count_adapters(config, model) if config.lora is not None else None
    run = estimate_run(config, plan, ModelSizes(total, total, total, adapters=adapters))
    yield MemoryRow("checkpoints", "disk", run.files.checkpoints * run.files.checkpoint_bytes, "checkpoint.keep")
    yield MemoryRow("exports", "disk", run.files.exports * run.files.export_bytes, "export.at_end")
    yield MemoryRow("a checkpoint that is written", "host", run.staging_bytes, "checkpoint.asynchronous")
