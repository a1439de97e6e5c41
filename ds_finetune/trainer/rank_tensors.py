"""The tensors that a rank of each pipeline stage holds: by arithmetic, or off a model without memory."""

import re
from collections import Counter
from dataclasses import replace

import torch

from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora_plan import LoraPlan
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import build_skeleton, model_class
from ds_finetune.model.loss.teacher import TeacherPlan
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.model.parallel.expert import build_local_experts
from ds_finetune.model.parallel.pipeline import PipelineGroup, build_only_layers, install_pipeline_stage
from ds_finetune.model.parallel.sharding import ModelShard
from ds_finetune.model.parallel.tensor import local_config
from ds_finetune.plan.estimate.rank_weights import rank_weights
from ds_finetune.plan.estimate.states import ModelSizes, TensorKind, fullest_stage, model_sizes
from ds_finetune.plan.lora_targets import nf4_bytes
from ds_finetune.plan.plan import Plan

Stages = tuple[tuple[TensorKind, ...], ...]
"""The tensors of a rank, by pipeline stage."""
_LAYER = re.compile(r"(?:(?<=\.layers\.)|(?<=\.layer\.))\d+(?=\.)")


def rank_tensors(plan: Plan, model: ModelPlan) -> Stages:
    """What a rank of each pipeline stage holds of `model`; the other ranks of the stage hold as much. Types whose
    arithmetic is not known are built.
    """
    hf_config = model.hf_config
    if family_of(hf_config.model_type).parameters is None:
        return built_tensors(plan, model)
    scores = 0 if model.task == "causal_lm" else model.head_outputs
    layers = len(mtp_layers(hf_config))
    stages = rank_weights(
        hf_config.to_dict(), plan.parallel, zero_ranks=plan.zero_ranks, mtp_layers=layers, scores=scores
    )
    return tuple(stage.kinds for stage in stages)


def built_tensors(plan: Plan, model: ModelPlan) -> Stages:
    """The tensors of each pipeline stage, read off the model itself, which is built on torch's meta device."""
    return tuple(tuple(_stage_tensors(plan, model, stage)) for stage in range(plan.mesh.pp))


def sizes_of(stages: Stages, lora: LoraPlan | None, teacher: TeacherPlan | None = None) -> ModelSizes:
    """The parameters of a model whose tensors are given, with its adapters and its teacher.

    Adapters are counted whole; a pipeline or tensor parallel rank holds a part of them.
    """
    sizes = model_sizes(stages)
    if teacher is not None:
        sizes = replace(sizes, teacher=teacher.count_params(), teacher_offload=teacher.offload)
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


def _stage_tensors(plan: Plan, model: ModelPlan, stage: int) -> list[TensorKind]:
    hf_config, mesh = model.hf_config, plan.mesh
    family, kind = family_of(hf_config.model_type), model_class(hf_config, model.task)
    with (
        build_local_experts(kind, family, ep_size=mesh.ep, mark=lambda _: None),
        build_only_layers(kind, model.stages[stage]),
    ):
        local = local_config(hf_config, mesh.tp)
        lm = build_skeleton(local, attention=model.attention, dtype=torch.bfloat16, device="meta", task=model.task)
    if mesh.pp > 1:
        install_pipeline_stage(lm, PipelineGroup(None, mesh.pp, stage), outputs=model.head_outputs)
    model_shard = ModelShard.of(mesh, family)
    kinds: Counter[tuple[str, tuple[int, ...], tuple[int, ...], int]] = Counter()
    for name, param in lm.named_parameters():
        shard = model_shard.tensor_shard(name, tuple(param.shape))
        sharers = plan.zero_ranks // (mesh.ep if shard.is_expert_parallel else 1)
        kinds[_LAYER.sub("N", name), shard.whole_shape, tuple(param.shape), sharers] += 1
    return [TensorKind(name, count, whole, local, sharers) for (name, whole, local, sharers), count in kinds.items()]
