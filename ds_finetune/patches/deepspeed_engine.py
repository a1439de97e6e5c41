"""DeepSpeed's engine and optimizers: when gradients are reduced, and the state that a constructor leaves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_finetune.patches.foreign import Foreign, replaced

_BOUNDARY = Foreign("deepspeed", "runtime/engine.py:3467-3493")
_ALLREDUCE = Foreign("deepspeed", "runtime/engine.py:548, 3163")
_COALESCE = Foreign("deepspeed", "runtime/engine.py:3239-3300")
_CONSTRUCTOR_STEP = Foreign("deepspeed", "runtime/fp16/unfused_optimizer.py:425, fused_optimizer.py:130")
_NORM = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:2943-2960")
_NORM_GROUPS = Foreign("deepspeed", "runtime/zero/stage3.py:2573-2584")
_EXPERT_NORM = Foreign("deepspeed", "runtime/zero/stage3.py:694-718, 1978, 2452")
_INVALID_NORM = -1.0
"""How DeepSpeed marks the norm of a group that is not finite (0.19.8, runtime/utils.py:891)."""
_LINKED_STATES = Foreign("deepspeed", "runtime/zero/stage_1_and_2.py:744, 852-857")


@contextmanager
def gradients_reduced_at_end(engine: Any, *, zero_stage: int) -> Iterator[None]:  # noqa: ANN401 - a DeepSpeedEngine
    """While this is open, gradients stay on this rank. They are reduced when it closes, and the next `step` is the
    optimizer's.

    DeepSpeed would reduce in every backward, but pipeline stages run different backwards at a time. After an error
    nothing is reduced, because the other ranks may never answer, and the engine's flags are what they were.
    """
    boundary = _BOUNDARY.attribute(engine, "_is_gradient_accumulation_boundary")
    engine.set_gradient_accumulation_boundary(False)
    try:
        with _coalesced(engine) if zero_stage else _without_allreduce(engine):
            yield
    except BaseException:
        engine.set_gradient_accumulation_boundary(boundary)
        raise
    engine.set_gradient_accumulation_boundary(True)
    if not zero_stage:
        engine.allreduce_gradients()


@contextmanager
def _without_allreduce(engine: Any) -> Iterator[None]:  # noqa: ANN401
    _ALLREDUCE.attribute(engine, "enable_backward_allreduce")
    with replaced(engine, "enable_backward_allreduce", False):
        yield


@contextmanager
def _coalesced(engine: Any) -> Iterator[None]:  # noqa: ANN401
    """DeepSpeed's own context for ZeRO 1 and 2, whose exit reduces after an error as well."""
    flush = _COALESCE.attribute(engine, "_flush_coalesced_reduction_zero12")
    _COALESCE.source(type(engine).coalesce_grad_reduction, "self._flush_coalesced_reduction_zero12(optimizer)")
    has_failed = False

    def flush_unless_failed(optimizer: object) -> None:
        if not has_failed:
            flush(optimizer)

    with replaced(engine, "_flush_coalesced_reduction_zero12", flush_unless_failed), engine.coalesce_grad_reduction():
        try:
            yield
        except BaseException:
            has_failed = True
            raise


def undo_constructor_step(optimizer: Any) -> None:  # noqa: ANN401 - one of DeepSpeed's wrappers
    """Undo the zero-gradient step that the optimizers of stage 0 in 16 bits take in their constructor.

    DeepSpeed calls `optimizer.step()` in `initialize_optimizer_states`, so Adam's bias correction starts at step 2 and
    the first update is 0.74 of what it should be. Measured on a tiny DeepSeek-V3 in bf16: losses 4.8801 4.6765 4.4844
    with it, 4.8801 4.6192 4.4135 without, 4.8801 4.6191 4.4134 under ZeRO-1.
    """
    inner = _CONSTRUCTOR_STEP.attribute(optimizer, "optimizer")
    _CONSTRUCTOR_STEP.attribute(optimizer, "initialize_optimizer_states")
    inner.state.clear()
    for group in inner.param_groups:
        if "step" in group:
            group["step"] = 0


def leave_out_of_norm(
    optimizer: Any,  # noqa: ANN401 - DeepSpeed's ZeRO optimizer
    is_left_out: Callable[[Any], bool],
    *,
    has_bad_gradient: Callable[[], bool],
) -> None:
    """Let the norm by which gradients are clipped have no part of the parameter groups whose first parameter is left
    out, which come last; they are clipped by the same factor as the others.

    Nothing is reduced for these groups, so that pipeline stages may have different numbers of them. The norm is invalid
    where `has_bad_gradient` is true, which must be so on every rank or on none: by an invalid norm alone DeepSpeed
    skips a step in fp32 (zero/stage_1_and_2.py:3042) and at stage 3 (zero/stage3.py:2888).
    """
    is_partitioned = hasattr(optimizer, "_get_norm_groups")
    place, norms, name = (
        (_NORM_GROUPS, "_get_norm_groups", "fp16_groups")
        if is_partitioned
        else (_NORM, "scaled_global_norm", "bit16_groups")
    )
    original, groups = place.attribute(optimizer, norms), place.attribute(optimizer, name)
    place.source(type(optimizer), f"for i, group in enumerate(self.{name}):")
    number = next((number for number, group in enumerate(groups) if is_left_out(group[0])), len(groups))
    assert all(is_left_out(group[0]) for group in groups[number:]), "a group that counts follows one that does not"

    def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with replaced(optimizer, name, groups[:number]):
            found = original(*args, **kwargs)
        if not has_bad_gradient():
            return found
        return [*found, _INVALID_NORM] if is_partitioned else torch.full_like(found, float("inf"))

    setattr(optimizer, norms, counted)


def count_whole_experts_once(optimizer: Any) -> None:  # noqa: ANN401 - DeepSpeed's optimizer of stage 3
    """Let the norm of a gradient treat experts like all other parameters: those that tensor parallel ranks hold whole
    count on the first rank alone.

    DeepSpeed counts every parameter of experts on each of these ranks. That holds where expert parallel groups span
    them; here a group has the ranks of one shard.
    """
    _EXPERT_NORM.attribute(optimizer, "_grad_norm_counts_every_rank")
    norm = _EXPERT_NORM.attribute(type(optimizer), "complete_grad_norm_calculation_for_cpu_offload")
    _EXPERT_NORM.source(
        norm, "if counts_every_rank or is_model_parallel_parameter(p) or (self.model_parallel_rank == 0):"
    )
    optimizer._grad_norm_counts_every_rank = lambda *_: False


def link_optimizer_states(optimizer: Any) -> None:  # noqa: ANN401 - DeepSpeed's optimizer of stages 1 and 2
    """Let DeepSpeed find the states of every parameter group.

    It links them once, after the first group's step, when the others have none yet (zero/stage_1_and_2.py:2987).
    """
    _LINKED_STATES.attribute(optimizer, "_hp_optimizer_states_linked")
    link = _LINKED_STATES.attribute(optimizer, "_lazy_init_hp_params_optimizer_state")
    optimizer._hp_optimizer_states_linked = False
    link()
