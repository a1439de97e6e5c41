"""The memory of a run by arithmetic: what a rank holds on its device, in host memory and on disk, and which option
lowers it.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ds_finetune.families.parameters import ModelConfig
from ds_finetune.plan.estimate.activation_rows import activation_rows, stage_activations
from ds_finetune.plan.estimate.config_text import config_text
from ds_finetune.plan.estimate.one_stage import as_one_stage
from ds_finetune.plan.estimate.rank_elements import count_adapters, rank_elements
from ds_finetune.plan.estimate.rank_weights import RankWeights, weights_of_run
from ds_finetune.plan.estimate.rows import MOMENTS, MemoryRow, Moment, Place, fullest_moment, peak
from ds_finetune.plan.estimate.states import ModelSizes, estimate_run
from ds_finetune.plan.estimate.teacher_rows import teacher_rows
from ds_finetune.plan.estimate.zero_rows import zero_rows
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


def estimate_memory(plan: Plan, model: ModelConfig, *, teacher: ModelConfig | None = None) -> MemoryEstimate:
    """What the run of `plan` needs, where `model` is the config.json of its model, and
    `teacher` that of a teacher, which is read from its folder where it is not given.

    ConfigError where the arithmetic of a model type is not known; ModelError where the teacher's folder is not here.
    """
    return fullest_stage(estimate_stages(plan, model, teacher=teacher))


def fullest_stage(stages: Iterable[MemoryEstimate]) -> MemoryEstimate:
    """The estimate of the stage that needs most on its device."""
    return max(stages, key=lambda estimate: estimate.device_bytes)


def estimate_stages(plan: Plan, model: ModelConfig, *, teacher: ModelConfig | None = None) -> Iterator[MemoryEstimate]:
    """What a rank of each pipeline stage needs, in their order; of stages that hold the same, the first alone, which
    has the most forwards in flight. Errors as those of `estimate_memory`.
    """
    device, stages = _home(plan), weights_of_run(plan, model)
    files, last = tuple(_file_rows(plan, model)), tuple(teacher_rows(plan, teacher))
    seen = set()
    for number, weights in enumerate(stages):
        is_last = number == len(stages) - 1
        held = (number == 0, is_last, weights.kinds, stage_activations(plan, model, weights))
        if held in seen:
            continue
        seen.add(held)
        # The teacher runs where the head is (engine/teacher.py).
        others = (*last, *files) if is_last else files
        yield MemoryEstimate((*_rows(plan, model, stages, number), *others), number, device)


class StateBytes(NamedTuple):
    """Bytes that a rank holds at least, whatever its activations are."""

    device: int
    host: int


def least_bytes(plan: Plan, model: ModelConfig) -> StateBytes:
    """Bytes of the states of a run, with and without recomputation, whichever are fewer: `estimate_memory` finds as
    many on the device and on the host or more. It takes a small part of the time.
    """
    found = [_state_bytes(plan, model, weights) for weights in weights_of_run(plan, model)]
    shared = _shared_bytes(plan, model)
    # Which stage is the fullest depends on activations too: of the host, the least of all stages is certain.
    return StateBytes(
        shared.device + max(each.device for each in found), shared.host + min(each.host for each in found)
    )


def least_bytes_of_stages(plan: Plan, model: ModelConfig) -> StateBytes:
    """What `least_bytes` finds at least on the device, and a stage of a pipeline needs on average on the host, however
    the layers are divided over stages.
    """
    merged = as_one_stage(plan)
    (weights,) = weights_of_run(merged, model)
    found, shared = _state_bytes(merged, model, weights), _shared_bytes(plan, model)
    return StateBytes(shared.device + found.device // plan.mesh.pp, shared.host + found.host // plan.mesh.pp)


def _state_bytes(plan: Plan, model: ModelConfig, weights: RankWeights) -> StateBytes:
    """Of one stage, without what all stages have."""
    own = rank_elements(plan, model, weights)
    plans = [replace(plan, activation_checkpointing=recomputes) for recomputes in (False, True)]
    rows = [tuple(zero_rows(each, own, weights)) for each in plans]
    return StateBytes(*(min(peak(each, place) for each in rows) for place in (_home(plan), "host")))


def _shared_bytes(plan: Plan, model: ModelConfig) -> StateBytes:
    """What every stage has of a checkpoint that is written, and of a teacher, which the last stage alone has."""
    teacher = teacher_rows(plan, None) if plan.mesh.pp == 1 else ()
    rows = [row for row in (*teacher, *_file_rows(plan, model)) if row.when == MOMENTS]
    return StateBytes(*(peak(rows, place) for place in (_home(plan), "host")))


def _home(plan: Plan) -> Place:
    return "host" if plan.device == "cpu" else "gpu"


def _rows(plan: Plan, model: ModelConfig, stages: tuple[RankWeights, ...], number: int) -> Iterator[MemoryRow]:
    own = rank_elements(plan, model, stages[number])
    yield from zero_rows(plan, own, stages[number])
    yield from activation_rows(plan, model, stages, number)


def _file_rows(plan: Plan, model: ModelConfig) -> Iterator[MemoryRow]:
    text = config_text(model)
    total = _total_params(text, 1 if plan.mtp.train else 0, plan.objective.num_outputs)
    adapters = count_adapters(plan, model) if plan.lora is not None else None
    run = estimate_run(plan, ModelSizes(total, total, total, adapters=adapters))
    yield MemoryRow("checkpoints", "disk", run.files.checkpoints * run.files.checkpoint_bytes, "checkpoint.keep")
    yield MemoryRow("exports", "disk", run.files.exports * run.files.export_bytes, "export.at_end")
    yield MemoryRow("a checkpoint that is written", "host", run.staging_bytes, "checkpoint.asynchronous")


@lru_cache(maxsize=64)
def _total_params(model: str, mtp_layers: int, scores: int) -> int:
    shape = Shape.of(json.loads(model), mtp_layers=mtp_layers)
    return (shape.with_scores(scores) if scores else shape).total_params
