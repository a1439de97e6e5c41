"""The forward of a teacher that runs beside the model, whose config.json is on this machine."""

import json
from dataclasses import replace
from pathlib import Path

from ds_finetune.families.parameters import ModelConfig
from ds_finetune.plan.estimate.operations import Work, executed_width
from ds_finetune.plan.model_shape import Shape


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
