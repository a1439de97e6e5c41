"""Corrections of DeepSpeed's engine and optimizers: when gradients are reduced, and the state after construction."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.patches.deepspeed_gathering import check_order_of_gathers
from ds_finetune.engine.patches.deepspeed_init import forget_second_copies
from ds_finetune.foreign.guard import Foreign, replaced
from ds_finetune.plan.plan import Plan
from ds_finetune.system.world import World

_BOUNDARY = Foreign("deepspeed", "runtime/engine.py:3467-3493")
_ALLREDUCE = Foreign("deepspeed", "runtime/engine.py:548, 3163")
_COALESCE = Foreign("deepspeed", "runtime/engine.py:3239-3300")
_CONSTRUCTOR_STEP = Foreign("deepspeed", "runtime/fp16/unfused_optimizer.py:425, fused_optimizer.py:130")
_EXPERT_NORM = Foreign("deepspeed", "runtime/zero/stage3.py:694-718, 1978, 2452")
_OVERLAP = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:1434, 1530-1546, 1594-1620, 2269")
_LINKED_STATES = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:744, 852-857")


@contextmanager
def gradients_reduced_at_end(engine: Any, *, zero_stage: int) -> Iterator[None]:  # noqa: ANN401 - a DeepSpeedEngine
    """Context in which gradients stay on this rank. At its end they are summed over ranks, and the next `step` is the
    optimizer's. DeepSpeed would sum them in every backward, which costs more and does not suit a pipeline, whose stages
    run backwards of different micro-batches at the same time. Gradients are accumulated in the dtype of the weights.
    After an error nothing is reduced, because other ranks may never answer, and the engine's flags are restored.
    """
    boundary = _BOUNDARY.attribute(engine, "_is_gradient_accumulation_boundary")
    _ALLREDUCE.attribute(engine, "enable_backward_allreduce")
    engine.set_gradient_accumulation_boundary(False)
    try:
        with _coalesced(engine, zero_stage) if zero_stage else replaced(engine, "enable_backward_allreduce", False):
            yield
    except BaseException:
        engine.set_gradient_accumulation_boundary(boundary)
        raise
    engine.set_gradient_accumulation_boundary(True)
    if not zero_stage:
        engine.allreduce_gradients()


@contextmanager
def _coalesced(engine: Any, zero_stage: int) -> Iterator[None]:  # noqa: ANN401
    """DeepSpeed's `coalesce_grad_reduction` for ZeRO stages 1 to 3, but nothing is reduced after an error."""
    name = "_flush_coalesced_reduction_zero3" if zero_stage == 3 else "_flush_coalesced_reduction_zero12"
    flush = _COALESCE.attribute(engine, name)
    _COALESCE.source(type(engine).coalesce_grad_reduction, f"self.{name}(optimizer)")
    has_failed = False

    def flush_unless_failed(optimizer: object) -> None:
        if not has_failed:
            flush(optimizer)

    with replaced(engine, name, flush_unless_failed), engine.coalesce_grad_reduction():
        try:
            yield
        except BaseException:
            has_failed = True
            raise


def undo_constructor_step(optimizer: Any) -> None:  # noqa: ANN401 - one of DeepSpeed's wrappers
    """Undo the step with zero gradients that DeepSpeed's 16-bit optimizers of stage 0 take in their constructor.
    DeepSpeed calls `optimizer.step()` in `initialize_optimizer_states`, so Adam's bias correction would start at step
    2, and the first update would be 0.74 of the right one. Measured on a tiny DeepSeek-V3 in bf16: losses 4.8801 4.6765
    4.4844 with the constructor's step, 4.8801 4.6192 4.4135 without it, 4.8801 4.6191 4.4134 under ZeRO-1.
    """
    inner = _CONSTRUCTOR_STEP.attribute(optimizer, "optimizer")
    _CONSTRUCTOR_STEP.attribute(optimizer, "initialize_optimizer_states")
    inner.state.clear()
    for group in inner.param_groups:
        if "step" in group:
            group["step"] = 0


def count_whole_experts_once(optimizer: Any) -> None:  # noqa: ANN401 - DeepSpeed's optimizer of stage 3
    """Make DeepSpeed's gradient norm at ZeRO stage 3 count replicated expert parameters once. DeepSpeed counts expert
    parameters on each tensor parallel rank. This is right if expert parallel groups extend over tensor parallel ranks,
    but in this program all ranks of such a group have one tensor parallel shard.
    """
    _EXPERT_NORM.attribute(optimizer, "_grad_norm_counts_every_rank")
    norm = _EXPERT_NORM.attribute(type(optimizer), "complete_grad_norm_calculation_for_cpu_offload")
    _EXPERT_NORM.source(
        norm, "if counts_every_rank or is_model_parallel_parameter(p) or (self.model_parallel_rank == 0):"
    )
    optimizer._grad_norm_counts_every_rank = lambda *_: False


@contextmanager
def destroyed_at_end(engine: Any, world: World) -> Iterator[None]:  # noqa: ANN401 - untyped: DeepSpeedEngine
    """Context that destroys a DeepSpeed engine at its end; after an error only if there is a single rank. `destroy`
    waits for the GPU (0.19.8, runtime/zero/stage3.py:549), which may be in a collective with ranks that have ended.
    """
    try:
        yield
    except BaseException:
        if world.world_size == 1:
            engine.destroy()
        raise
    engine.destroy()


def link_optimizer_states(optimizer: Any) -> None:  # noqa: ANN401 - DeepSpeed's optimizer of stages 1 and 2
    """Make DeepSpeed link the optimizer states of all parameter groups to their parameters. It would link them after
    the step of the first group, when the other groups have no states yet (zero/stage_1_and_2.py:2987).
    """
    _LINKED_STATES.attribute(optimizer, "_hp_optimizer_states_linked")
    link = _LINKED_STATES.attribute(optimizer, "_lazy_init_hp_params_optimizer_state")
    optimizer._hp_optimizer_states_linked = False
    link()


def keep_reduced_gradients(optimizer: Any) -> None:  # noqa: ANN401 - DeepSpeed's optimizer of stages 1 and 2
    """Make the allocator keep gradients until the stream of `overlap_comm` has reduced them. A gradient larger than a
    bucket is reduced in place, and ranks that own no part of it release it while the reduction still runs. If several
    ranks own parts of it, DeepSpeed does not tell the allocator that the stream still reads its memory. So the next
    kernels of backward may overwrite the gradient, and the sum over ranks would be wrong.
    """
    average = _OVERLAP.attribute(optimizer, "average_tensor")
    _OVERLAP.source(average, "stream = self.reduction_stream")

    def average_kept(tensor: torch.Tensor, dtype: torch.dtype) -> None:
        average(tensor, dtype)
        tensor.record_stream(optimizer.reduction_stream)

    optimizer.average_tensor = average_kept


def correct_start(trained: nn.Module, optimizer: object, plan: Plan, groups: Groups) -> None:
    """Undo what DeepSpeed does wrongly at the plan's ZeRO stage when it wraps the model and the optimizer. ConfigError
    if DeepSpeed's results would be wrong with the options of `plan`.
    """
    if plan.zero_stage == 0 and plan.precision != "fp32":
        undo_constructor_step(optimizer)
    if plan.zero_stage in (1, 2) and getattr(optimizer, "overlap_comm", False):
        keep_reduced_gradients(optimizer)
    if plan.zero_stage == 3:
        check_order_of_gathers(optimizer, trained, plan)
        forget_second_copies(trained)
    if plan.zero_stage == 3 and groups.tensor is not None and groups.experts is not None:
        count_whole_experts_once(optimizer)
