"""Builds the part of a model that this rank holds, with its weights, its features and its loss head."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.initial_weights import fill_weights
from ds_finetune.engine.rank_modules import arrange_forward, build_modules, install_groups, install_head
from ds_finetune.engine.state.parameter_tags import mark_copy, tag_apart, tag_expert
from ds_finetune.engine.state.zero3_partition import partition
from ds_finetune.families.table import family_of
from ds_finetune.features.feature import Feature
from ds_finetune.model.adapters.lora import AdapterPlacement
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import whole
from ds_finetune.model.parallel.pipeline import has_embedding_copy, has_tied_head
from ds_finetune.model.parallel.sharding import ModelShard
from ds_finetune.model.quantised.four_bit import four_bit_or
from ds_finetune.plan.plan import Plan


def build_rank_model(
    plan: Plan, model: ModelPlan, groups: Groups, features: Sequence[Feature], *, loads_weights: bool
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The part of the model that this rank holds, with its weights, features and loss head; and the names of parameters
    that were randomly initialised because the model's folder does not have them.
    """
    lm = build_modules(plan, model, groups)
    install_groups(lm, model, groups)
    placement = _placement(lm, plan, groups)
    # Checkpoints do not hold frozen weights that are in the model's folder.
    loads_weights = loads_weights or not all(feature.saves_frozen for feature in features)
    drawn = fill_weights(lm, plan, model, where=placement.where, loads_weights=loads_weights)
    for feature in features:
        feature.install(lm, placement)
    _mark_parameters(lm, plan, model, groups, features)
    install_head(lm, plan, model, groups)
    arrange_forward(lm, plan, model)
    return lm, drawn


def _placement(lm: PreTrainedModel, plan: Plan, groups: Groups) -> AdapterPlacement:
    """Where parameters of `lm` lie."""
    is_partitioned = plan.zero_stage == 3
    share = partial(_partition_like_model, lm) if is_partitioned else None
    placement = AdapterPlacement(
        four_bit_or(partition if is_partitioned else whole, share),
        ModelShard.of(plan.mesh, family_of(lm.config.model_type)),
        tp_group=groups.tensor,
        mark_expert=partial(tag_expert, groups=groups),
    )
    return placement if share is None else replace(placement, share=share)


def _partition_like_model(lm: PreTrainedModel, params: list[nn.Parameter]) -> None:
    """Partition new parameters like the others of `lm`, with the `zero.Init` context that made those (DeepSpeed 0.19.8,
    zero/partition_parameters.py:1660).
    """
    partitioned: Any = next(param for param in lm.parameters() if hasattr(param, "ds_tensor"))
    partitioned.convert_to_zero_parameters(param_list=params)


def _mark_parameters(
    lm: PreTrainedModel, plan: Plan, model: ModelPlan, groups: Groups, features: Sequence[Feature]
) -> None:
    """Mark parameters that are not trained, that another stage holds too, and that a loss of their own trains."""
    for name, param in lm.named_parameters():
        if name in plan.frozen or model.is_untrained(name):
            param.requires_grad_(False)
        for feature in features:
            if feature.owns(name):
                tag_apart(param, feature.own_loss)
    if groups.stage is not None and has_embedding_copy(lm, groups.stage):
        mark_copy(lm.get_input_embeddings().weight)
        if not has_tied_head(lm) and (model.mtp is None or model.mtp.detach):
            lm.get_input_embeddings().weight.requires_grad_(False)
