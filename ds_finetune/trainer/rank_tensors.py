"""The tensors that a rank of each pipeline stage of a run holds, and the sizes that follow."""

import re
from dataclasses import replace

from ds_finetune.model.adapters.lora_plan import LoraPlan
from ds_finetune.model.build.meta_model import read_tensors
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.loss.teacher import TeacherPlan
from ds_finetune.plan.estimate.rank_weights import rank_weights
from ds_finetune.plan.estimate.states import ModelSizes, TensorKind, fullest_stage, model_sizes
from ds_finetune.plan.lora_targets import nf4_bytes
from ds_finetune.plan.plan import Plan

Stages = tuple[tuple[TensorKind, ...], ...]
"""The tensors of a rank, by pipeline stage."""
_LAYER = re.compile(r"(?:(?<=\.layers\.)|(?<=\.layer\.))\d+(?=\.)")


def rank_tensors(plan: Plan, model: ModelPlan) -> Stages:
    """What a rank of each pipeline stage holds of `model`; the other ranks of the stage hold as much."""
    return tuple(stage.kinds for stage in rank_weights(model.described, plan.parallel, zero_ranks=plan.zero_ranks))


def sizes_of(stages: Stages, lora: LoraPlan | None, teacher: TeacherPlan | None = None) -> ModelSizes:
    """The parameters of a model whose tensors are given, with its adapters and its teacher.

    Adapters are counted whole; a pipeline or tensor parallel rank holds a part of them.
    """
    sizes = model_sizes(stages)
    if teacher is not None:
        sizes = replace(sizes, teacher=read_tensors(teacher.hf_config).numel, teacher_offload=teacher.offload)
    if lora is None:
        return sizes
    names = {_LAYER.sub("N", f"{target.name}.weight") for target in lora.quantised}
    kinds = [kind for kind in fullest_stage(stages) if kind.name in names]
    return replace(
        sizes,
        adapters=lora.num_params,
        quantised=sum(kind.numel for kind in kinds),
        quantised_bytes=sum(kind.count * nf4_bytes(kind.local) for kind in kinds),
    )
