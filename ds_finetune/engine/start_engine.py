"""Starts the engine of a plan: builds the model with its features, and passes it to DeepSpeed."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
from transformers import PreTrainedModel

from ds_finetune.engine.attention_kernel import packs_documents
from ds_finetune.engine.deepspeed_start import (
    check_before_start,
    correct_start,
    patched_deepspeed,
    set_norms,
    start_deepspeed,
)
from ds_finetune.engine.devices import device_of_rank
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.process_groups import Groups, open_groups
from ds_finetune.engine.rank_model import build_rank_model
from ds_finetune.engine.state.parameter_tags import is_copy
from ds_finetune.engine.teacher import start_teacher
from ds_finetune.features.feature import Feature, RankParts
from ds_finetune.features.table import features_of
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.loss.token_loss import HeadGroups, TrainedModel
from ds_finetune.model.mtp.layer import mtp_layers
from ds_finetune.model.parallel.pipeline import ModelChunks
from ds_finetune.model.weights.load import seed_of
from ds_finetune.plan.plan import Plan


@contextmanager
def start_engine(plan: Plan, model: ModelPlan, *, loads_weights: bool = True) -> Iterator[Engine]:
    """Build `model` under the ZeRO stage of `plan` and yield the engine; needs an open process group.

    Without `loads_weights` parameters hold zeros, into which a checkpoint is restored. Weights are loaded all the same
    where some parameters are not trained, because checkpoints do not hold them.
    """
    check_before_start(plan, model)
    features = features_of(model, plan)
    with _open_groups(plan, model) as groups, ExitStack() as stack:
        parts = _rank_parts(plan, model, groups)
        for feature in features:
            stack.enter_context(feature.open(parts))
        stack.enter_context(patched_deepspeed(plan))
        lm, drawn = build_rank_model(plan, model, groups, features, loads_weights=loads_weights)
        plan = replace(plan, frozen=_saved_frozen(lm, features))
        trained = _trained_model(lm, plan, model, groups, features)
        wrapped, optimizer = start_deepspeed(trained, plan, groups)
        stack.callback(wrapped.destroy)
        _add_extra_losses(trained, features, parts)
        correct_start(trained, optimizer, plan, groups)
        engine = Engine(wrapped, plan, groups, model.objective)
        set_norms(engine, optimizer, groups, [feature.own_loss for feature in features if feature.own_loss])
        engine.drawn = drawn
        # Dropout draws from torch's own generator: other numbers on ranks with other rows, the same on ranks that share
        # them. A resumed run restores its state.
        torch.manual_seed(seed_of(plan.seed, f"dropout.{plan.mesh.place('dp')}"))
        with engine.meter.counting():
            yield engine


def _open_groups(plan: Plan, model: ModelPlan) -> AbstractContextManager[Groups]:
    return open_groups(
        plan.mesh,
        shares_embedding=bool(model.hf_config.tie_word_embeddings or mtp_layers(model.hf_config)),
        vpp=len(model.stages[0].chunks) if model.stages[0] is not None else 1,
        timeout=timedelta(seconds=plan.collective_seconds),
    )


def _rank_parts(plan: Plan, model: ModelPlan, groups: Groups) -> RankParts:
    return RankParts(
        groups=HeadGroups(tp=groups.tensor, sp=groups.sequence, pp=groups.stage),
        device=torch.device(device_of_rank(plan.device, plan.world.local_rank)),
        start_teacher=partial(start_teacher, plan, model, groups),
    )


def _trained_model(
    lm: PreTrainedModel, plan: Plan, model: ModelPlan, groups: Groups, features: Sequence[Feature]
) -> TrainedModel:
    """The module whose forward is the loss."""
    trained = TrainedModel(lm, groups.sequence, groups.stage)
    for feature in features:
        trained = feature.wrap(trained)
    layers = model.stages[groups.stage.group_rank] if groups.stage is not None else None
    if groups.stage is not None and layers is not None and len(layers.chunks) > 1:
        trained.chunks = ModelChunks(lm, groups.stage, layers.chunks)
    trained.packs_documents = packs_documents(
        model.attention, model.hf_config, device=plan.device, precision=plan.precision
    )
    return trained


def _saved_frozen(lm: PreTrainedModel, features: Sequence[Feature]) -> tuple[str, ...]:
    """Names of this rank's frozen parameters that checkpoints hold."""
    if not all(feature.saves_frozen for feature in features):
        return ()
    return tuple(name for name, param in lm.named_parameters() if not param.requires_grad and not is_copy(param))


def _add_extra_losses(trained: TrainedModel, features: Sequence[Feature], parts: RankParts) -> None:
    """Let the forward compute the auxiliary losses of `features`.

    After `deepspeed.initialize`, whose hooks must run before those of features.
    """
    losses = (feature.extra_loss(trained, parts) for feature in features)
    trained.extras = tuple(loss for loss in losses if loss is not None)
