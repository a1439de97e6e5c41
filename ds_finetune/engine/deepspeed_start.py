"""Gives a model to DeepSpeed, and corrects what DeepSpeed does wrong when it takes it over."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from ds_finetune.console.quiet import deepspeed_level
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.ops.nvme import check_buffers, check_nvme
from ds_finetune.engine.patches.deepspeed_clipping import OwnClipping
from ds_finetune.engine.patches.deepspeed_engine import count_whole_experts_once, undo_constructor_step
from ds_finetune.engine.patches.deepspeed_gathering import single_gathers_without_waits
from ds_finetune.engine.patches.deepspeed_init import forget_second_copies, zenflow_keeps_matrices
from ds_finetune.engine.patches.deepspeed_waits import HalfPrecisionNorms, ZeroNorms, has_zero_norms
from ds_finetune.engine.state.parameter_tags import experts_marker, is_trained_expert, loss_of, parameter_groups
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.plan.plan import Plan


@contextmanager
def patched_deepspeed(plan: Plan) -> Iterator[None]:
    """While this is open, DeepSpeed has the patches that a run of `plan` needs."""
    with (
        zenflow_keeps_matrices() if plan.has_zenflow else nullcontext(),
        single_gathers_without_waits() if plan.zero_stage == 3 else nullcontext(),
    ):
        yield


def check_before_start(plan: Plan, model: ModelPlan) -> None:
    """Refuse what DeepSpeed cannot offload on this machine, and let it print as little as the run wants."""
    from deepspeed.utils import set_log_level_from_string

    level = deepspeed_level()
    set_log_level_from_string("warning" if level == "quiet" else level)
    check_nvme(plan)
    check_buffers(plan, model)


def start_deepspeed(trained: TrainedModel, plan: Plan, groups: Groups) -> tuple[Any, Any]:
    """DeepSpeed's engine around `trained`, and its optimizer."""
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


def correct_start(trained: TrainedModel, optimizer: object, plan: Plan, groups: Groups) -> None:
    """Undo what DeepSpeed did wrong at this stage when it took over the model and wrapped the optimizer."""
    if plan.zero_stage == 0 and plan.precision != "fp32":
        undo_constructor_step(optimizer)
    if plan.zero_stage == 3:
        forget_second_copies(trained)
    if plan.zero_stage == 3 and groups.tensor is not None and groups.experts is not None:
        count_whole_experts_once(optimizer)


def set_norms(engine: Engine, optimizer: Any, groups: Groups, own_losses: Sequence[str]) -> None:  # noqa: ANN401 - DeepSpeed's
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
