"""Starts the engine of a plan: builds the model with its features, and passes it to DeepSpeed."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.config.sections import OWN_ATTENTIONS
from ds_finetune.console.quiet import deepspeed_level
from ds_finetune.engine.devices import device_of_rank
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.process_groups import Groups, open_groups
from ds_finetune.engine.ops.nvme import check_buffers, check_nvme
from ds_finetune.engine.patches.deepspeed_clipping import OwnClipping
from ds_finetune.engine.patches.deepspeed_engine import count_whole_experts_once, undo_constructor_step
from ds_finetune.engine.patches.deepspeed_gathering import single_gathers_without_waits
from ds_finetune.engine.patches.deepspeed_init import forget_second_copies, zenflow_keeps_matrices, zero_init
from ds_finetune.engine.patches.deepspeed_waits import HalfPrecisionNorms, ZeroNorms, has_zero_norms
from ds_finetune.engine.rank_model import build_rank_model
from ds_finetune.engine.state.parameter_tags import (
    experts_marker,
    is_copy,
    is_trained_expert,
    loss_of,
    parameter_groups,
)
from ds_finetune.engine.state.whole_tensors import partition
from ds_finetune.errors import ModelError
from ds_finetune.features.feature import Feature, RankParts
from ds_finetune.features.table import features_of
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import whole
from ds_finetune.model.loss.teacher import HiddenStates, Teacher, load_teacher
from ds_finetune.model.loss.token_loss import HeadGroups, TrainedModel
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.model.parallel.pipeline import ModelChunks
from ds_finetune.model.weights.load import seed_of
from ds_finetune.plan.forward import varlen_problem
from ds_finetune.plan.plan import Plan, is_teacher_partitioned
from ds_finetune.system.world import World


@contextmanager
def start_engine(plan: Plan, model: ModelPlan, *, loads_weights: bool = True) -> Iterator[Engine]:
    """Build `model` under the ZeRO stage of `plan` and yield the engine; needs an open process group.

    Without `loads_weights` parameters hold zeros, into which a checkpoint is restored. Weights are loaded all the same
    where some parameters are not trained, because checkpoints do not hold them.
    """
    _check_before_start(plan, model)
    features = features_of(model, plan)
    opened = open_groups(
        plan.mesh,
        shares_embedding=bool(model.hf_config.tie_word_embeddings or mtp_layers(model.hf_config)),
        vpp=len(model.stages[0].chunks) if model.stages[0] is not None else 1,
        timeout=timedelta(seconds=plan.collective_seconds),
    )
    with opened as groups, ExitStack() as stack:
        parts = RankParts(
            groups=HeadGroups(tp=groups.tensor, sp=groups.sequence, pp=groups.stage),
            device=torch.device(device_of_rank(plan.device, plan.world.local_rank)),
            start_teacher=partial(start_teacher, plan, model, groups),
        )
        for feature in features:
            stack.enter_context(feature.open(parts))
        if plan.has_zenflow:
            stack.enter_context(zenflow_keeps_matrices())
        if plan.zero_stage == 3:
            stack.enter_context(single_gathers_without_waits())
        lm, drawn = build_rank_model(plan, model, groups, features, loads_weights=loads_weights)
        plan = replace(plan, frozen=_saved_frozen(lm, features))
        trained = _trained_model(lm, plan, model, groups, features)
        wrapped, optimizer = _start_deepspeed(trained, plan, groups)
        stack.enter_context(destroyed_at_end(wrapped, plan.world))
        # After `deepspeed.initialize`, whose hooks must run before those of features.
        losses = (feature.extra_loss(trained, parts) for feature in features)
        trained.extras = tuple(loss for loss in losses if loss is not None)
        _correct_start(trained, optimizer, plan, groups)
        engine = Engine(wrapped, plan, groups, model.objective)
        _set_norms(engine, optimizer, groups, [feature.own_loss for feature in features if feature.own_loss])
        engine.drawn = drawn
        # Dropout draws from torch's own generator: other numbers on ranks with other rows, the same on ranks that share
        # them. A resumed run restores its state.
        torch.manual_seed(seed_of(plan.seed, f"dropout.{plan.mesh.place('dp')}"))
        with engine.meter.counting():
            yield engine


@contextmanager
def destroyed_at_end(engine: Any, world: World) -> Iterator[None]:  # noqa: ANN401 - untyped: DeepSpeedEngine
    """Destroy a DeepSpeed engine when the context closes; after an error only where there are no other ranks.

    `destroy` waits for the GPU (0.19.8, runtime/zero/stage3.py:549), which may be in a collective with ranks that are
    gone.
    """
    try:
        yield
    except BaseException:
        if world.world_size == 1:
            engine.destroy()
        raise
    engine.destroy()


def _trained_model(
    lm: PreTrainedModel, plan: Plan, model: ModelPlan, groups: Groups, features: Sequence[Feature]
) -> TrainedModel:
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
    if not all(feature.saves_frozen for feature in features):
        return ()
    return tuple(name for name, param in lm.named_parameters() if not param.requires_grad and not is_copy(param))


def packs_documents(attention: str, hf_config: PretrainedConfig, *, device: str, precision: str) -> bool:
    """Whether attention takes all documents of a forward in one call on this rank's `device`, `cpu` or `cuda`.

    ModelError where the run file names that kernel and this GPU does not have it.
    """
    if attention not in OWN_ATTENTIONS or attention == "by_document":
        return False
    if device == "cpu":
        gpu, problem = device, "its kernel runs only on GPUs"
    else:
        gpu, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        problem = varlen_problem(hf_config.to_dict(), precision=precision, capability=capability)
    if problem and attention == "varlen":
        raise ModelError(
            f"model.attention varlen with model_type `{hf_config.model_type}` on {gpu}: {problem}",
            hint="set model.attention: sdpa, which attends document by document there",
        )
    return not problem


def _check_before_start(plan: Plan, model: ModelPlan) -> None:
    """Refuse what DeepSpeed cannot offload on this machine, and let it print as little as the run wants."""
    from deepspeed.utils import set_log_level_from_string

    level = deepspeed_level()
    set_log_level_from_string("warning" if level == "quiet" else level)
    check_nvme(plan)
    check_buffers(plan, model)


def _start_deepspeed(trained: TrainedModel, plan: Plan, groups: Groups) -> tuple[Any, Any]:
    import deepspeed

    if groups.experts is not None and plan.zero_stage < 3 and any(map(is_trained_expert, trained.parameters())):
        trained.has_experts = experts_marker(groups.experts.size)
    wrapped, optimizer, _, _ = deepspeed.initialize(
        model=trained,
        model_parameters=parameter_groups(trained, plan, groups),
        config=plan.deepspeed,
        dist_init_required=False,
        mpu=groups.mpu,
    )
    return wrapped, optimizer


def _correct_start(trained: TrainedModel, optimizer: object, plan: Plan, groups: Groups) -> None:
    """Undo what DeepSpeed did wrong at this stage when it took over the model and wrapped the optimizer."""
    if plan.zero_stage == 0 and plan.precision != "fp32":
        undo_constructor_step(optimizer)
    if plan.zero_stage == 3:
        forget_second_copies(trained)
    if plan.zero_stage == 3 and groups.tensor is not None and groups.experts is not None:
        count_whole_experts_once(optimizer)


def _set_norms(engine: Engine, optimizer: Any, groups: Groups, own_losses: Sequence[str]) -> None:  # noqa: ANN401 - DeepSpeed's
    """Let norms of the gradient be read once, and clip parameters that only one of `own_losses` trains by a norm of
    their own; at stage 0 the engine does so.
    """
    engine.own_norms = dict.fromkeys(own_losses, 0.0)
    if not engine.plan.zero_stage:
        if engine.plan.precision != "fp32":
            engine.norms = HalfPrecisionNorms(optimizer, lambda: engine.has_bad_gradient)
        return
    norms = None
    if has_zero_norms(optimizer):
        engine.norms = norms = ZeroNorms(optimizer, lambda: engine.has_bad_gradient)
    if engine.own_norms:
        OwnClipping(
            optimizer,
            loss_of,
            losses=own_losses,
            shards=groups.tensor.group if groups.tensor is not None else None,
            norms=norms,
            has_bad_gradient=lambda: engine.has_bad_gradient,
            report=partial(setattr, engine, "own_norms"),
        )


@contextmanager
def start_teacher(plan: Plan, model: ModelPlan, groups: Groups) -> Iterator[Teacher | None]:
    """The live teacher of `model`, None where it has none, and on pipeline stages before the last.

    At ZeRO stage 3, and where it is offloaded, its weights are partitioned over all ranks by a second DeepSpeed engine,
    which gathers them module by module. Otherwise each rank holds them whole.
    """
    if model.teacher is None or not (groups.stage is None or groups.stage.is_last):
        yield None
        return
    is_partitioned = is_teacher_partitioned(plan.zero_stage, model.teacher.offload)
    zero: dict[str, Any] = {"stage": 3}
    if model.teacher.offload != "none":
        zero["offload_param"] = {"device": model.teacher.offload, "pin_memory": plan.device != "cpu"}
    # ZeRO-3 without an optimizer.
    tree: dict[str, Any] = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
    if plan.precision != "fp32":
        tree[plan.precision] = {"enabled": True}
    lm = load_teacher(
        model.teacher,
        attention=model.attention,
        dtype=PRECISION_DTYPES[plan.precision],
        device=device_of_rank(plan.device, plan.world.local_rank),
        where=partition if is_partitioned else whole,
        init_context=zero_init(tree) if is_partitioned else None,
    )
    states = HiddenStates(lm, groups.sequence)
    states.packs_documents = packs_documents(
        model.attention, model.teacher.hf_config, device=plan.device, precision=plan.precision
    )
    head: Any = lm.get_output_embeddings()
    if not is_partitioned:
        yield Teacher(states, head, nullcontext)
        return
    import deepspeed

    engine, *_ = deepspeed.initialize(model=states, config=tree, dist_init_required=False)
    engine.eval()
    with destroyed_at_end(engine, plan.world):
        yield Teacher(engine, head, deepspeed.zero.GatheredParameters)
