"""Starts the engine of a plan: builds the model with its features, and initialises DeepSpeed."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_finetune.console.quiet import deepspeed_level
from ds_finetune.engine.devices import device_of_rank
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.process_groups import Groups, open_groups
from ds_finetune.engine.ops.deepspeed_ops import check_nvme_folder, nvme_folders
from ds_finetune.engine.patches.deepspeed_clipping import OwnClipping
from ds_finetune.engine.patches.deepspeed_engine import correct_start, destroyed_at_end
from ds_finetune.engine.patches.deepspeed_init import zenflow_keeps_matrices
from ds_finetune.engine.rank_model import build_rank_model, saved_frozen, start_teacher, trained_model
from ds_finetune.engine.state.parameter_tags import experts_marker, is_expert, parameter_groups
from ds_finetune.features.feature import RankParts
from ds_finetune.features.table import features_of
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.loss.token_loss import HeadGroups, TrainedModel
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.model.parallel.tensor import local_config
from ds_finetune.model.weights.load import seed_of
from ds_finetune.plan.plan import Plan, check_largest_slice


@contextmanager
def start_engine(plan: Plan, model: ModelPlan, *, loads_weights: bool = True) -> Iterator[Engine]:
    """Context that builds `model` under the ZeRO stage of `plan`, and gives its engine. Needs an open process group.
    Without `loads_weights` parameters are zeros, into which a checkpoint is restored. If some parameters are frozen,
    weights are loaded nevertheless, because checkpoints lack frozen weights.
    """
    from deepspeed.utils import set_log_level_from_string

    set_log_level_from_string("warning" if (level := deepspeed_level()) == "quiet" else level)
    _check_offload(plan, model)
    features = features_of(model, plan)
    opened = open_groups(
        plan.mesh,
        shares_embedding=bool(model.hf_config.tie_word_embeddings or mtp_layers(model.hf_config)),
        vpp=len(model.stages[0].chunks) if model.stages[0] is not None else 1,
        timeout=timedelta(seconds=plan.watchdog.collective_seconds),
    )
    with opened as groups, ExitStack() as stack:
        parts = RankParts(
            groups=HeadGroups(tp=groups.tensor, sp=groups.sequence, pp=groups.stage),
            device=torch.device(device_of_rank(plan.device, plan.world.local_rank)),
            start_teacher=partial(start_teacher, plan, model, groups),
        )
        for feature in features:
            stack.enter_context(feature.open(parts))
        if plan.zero.get("zenflow") is not None:
            stack.enter_context(zenflow_keeps_matrices())
        lm, random_parameters, in_fp32 = build_rank_model(plan, model, groups, features, loads_weights=loads_weights)
        plan = replace(plan, frozen=saved_frozen(lm, features))
        trained = trained_model(lm, plan, model, groups, features)
        trained.in_fp32 = in_fp32
        wrapped, optimizer = _start_deepspeed(trained, plan, groups)
        stack.enter_context(destroyed_at_end(wrapped, plan.world))
        # DeepSpeed's hooks must run before the hooks of features, so losses are added after `deepspeed.initialize`.
        trained.extras = tuple(filter(None, (feature.extra_loss(trained, parts) for feature in features)))
        correct_start(trained, optimizer, plan, groups)
        engine = Engine(wrapped, plan, groups, model.objective)
        if in_fp32.params:
            engine.state.store_fp32()
        engine.own_norms = dict.fromkeys((feature.own_loss for feature in features if feature.own_loss), 0.0)
        if plan.zero_stage and engine.own_norms:
            # At ZeRO stage 0 the engine itself clips parameters that only an auxiliary loss trains.
            OwnClipping(engine, optimizer, groups)
        engine.random_parameters = random_parameters
        # Dropout uses torch's generator. Ranks with different tokens or layers have different seeds. Tensor parallel
        # ranks have equal seeds, because they sample masks of full activations. A resumed run restores the generator's
        # state.
        coordinates = ".".join(str(plan.mesh.coordinate(axis)) for axis in ("dp", "sp", "pp"))
        torch.manual_seed(seed_of(plan.train.seed, f"dropout.{coordinates}"))
        with engine.meter.counting():
            yield engine


def _check_offload(plan: Plan, model: ModelPlan) -> None:
    for folder in nvme_folders(plan):
        check_nvme_folder(Path(folder), f"probe-rank{plan.world.rank}")
    if plan.offload_param == "nvme":
        local = copy.deepcopy(local_config(model.hf_config, plan.mesh.tp))
        skeleton = build_skeleton(local, attention=model.attention, dtype=torch.bfloat16, device="meta")
        check_largest_slice(plan, ((param.numel(), name) for name, param in skeleton.named_parameters()))


def _start_deepspeed(trained: TrainedModel, plan: Plan, groups: Groups) -> tuple[Any, Any]:
    import deepspeed

    # With adapters no expert may be trained. Then DeepSpeed must not expect gradients of experts.
    trains_experts = any(is_expert(param) and param.requires_grad for param in trained.parameters())
    if groups.experts is not None and plan.zero_stage < 3 and trains_experts:
        trained.has_experts = experts_marker(groups.experts.size)
    make_optimizer = None
    if plan.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        make_optimizer = partial(AdamW8bit, **plan.deepspeed_config["optimizer"]["params"])
    wrapped, optimizer, _, _ = deepspeed.initialize(
        model=trained,
        optimizer=make_optimizer,
        model_parameters=parameter_groups(trained, plan, groups),
        config=plan.deepspeed_config,
        dist_init_required=False,
        mpu=groups.mpu,
    )
    return wrapped, optimizer
