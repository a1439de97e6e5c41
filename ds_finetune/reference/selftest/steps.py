"""Takes optimizer steps of an engine on the samples, and reads their gradients."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from ds_finetune.data.batches import Batch, BatchPlan, eval_baseline, eval_batches, training_batches
from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.scores import StoredScores, with_scores
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.model.weights.names import is_adapter
from ds_finetune.objectives.objective import Distillation, Objective
from ds_finetune.plan.plan import Plan
from ds_finetune.reference.selftest.cells import rows
from ds_finetune.reference.selftest.mismatched import all_reference_log_probs, mismatched_answers
from ds_finetune.reference.selftest.reference_loop import BETAS, LIMITS, LR, PROMPTS, Steps


def batch_plan(plan: Plan, objective: Objective | None = None) -> BatchPlan:
    """How the samples are distributed over ranks, for `objective` or one whose loss is a sum over tokens."""
    is_compared = objective is not None and objective.needs_reference
    return BatchPlan(
        global_batch_size=plan.batch.global_batch_size,
        micro_batch_size=plan.batch.micro_batch_size,
        rank=plan.mesh.place("dp"),
        dp=plan.dp,
        seed=0,
        shuffle=False,
        pad_token_id=0,
        row_len=plan.batch.max_seq_len if plan.batch.is_packed else None,
        multiple=plan.mesh.sp,
        looks_ahead=plan.mtp.train,
        documents_per_unit=objective.documents_per_unit if objective is not None else 0,
        reference=all_reference_log_probs() if is_compared else None,
    )


def take_steps(engine: Engine, steps: int) -> Iterator[Steps]:
    """Take steps on all samples, and yield the results so far after each step.

    Gradients are read only for AdamW in fp32: of the first step, and of adapters in the second. Answers are generated
    after the last step.
    """
    plan, results = engine.plan, Steps()
    has_gradients = plan.optimizer.name == "adamw" and plan.precision == "fp32"
    for step in range(steps):
        result = engine.step(whole_batch(engine), lr=LR)
        results.losses.append(result.loss)
        results.norms.append(result.grad_norm)
        results.balances += [result.metrics["balance_loss"]] if "balance_loss" in result.metrics else []
        results.mtp_losses += [result.metrics["mtp_loss"]] if "mtp_loss" in result.metrics else []
        results.mtp_norms += [result.metrics["mtp_grad_norm"]] if "mtp_grad_norm" in result.metrics else []
        results.choices += [result.router_choices.counts] if result.router_choices is not None else []
        if step == 0 and has_gradients:
            results.gradients = first_gradients(engine)
        if step == 1 and has_gradients:
            results.later_gradients = _later_gradients(engine, results.gradients)
        if step == steps - 1 and engine.objective.head != "scores":
            answers = engine.generate(PROMPTS, LIMITS)
            assert answers is not None
            results.answers = answers
        yield results


def eval_loss(engine: Engine) -> float:
    """Mean loss over the samples."""
    every = rows(engine.plan.batch.is_packed, engine.objective.documents_per_unit)
    plan, mismatched = batch_plan(engine.plan, engine.objective), _mismatched(engine)
    baseline = () if mismatched is None else eval_baseline(mismatched, plan)
    evaluation = engine.evaluate(_with_scores(engine, eval_batches(every, plan)), baseline=baseline)
    assert evaluation is not None
    return evaluation.loss


def whole_batch(engine: Engine) -> Batch:
    """This rank's share of a batch of all samples."""
    every = rows(engine.plan.batch.is_packed, engine.objective.documents_per_unit)
    plan = batch_plan(engine.plan, engine.objective)
    batches = training_batches(every, plan, start_step=0, total_rows=len(every), mismatched=_mismatched(engine))
    return next(_with_scores(engine, batches))


def _mismatched(engine: Engine) -> MismatchedAnswers | None:
    """What KTO's z0 is computed from; None for other objectives."""
    is_packed = engine.plan.batch.is_packed
    return mismatched_answers(packing=is_packed) if engine.objective.needs_baseline else None


def _with_scores(engine: Engine, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches with a teacher's stored distributions, where the objective reads such."""
    objective = engine.objective
    if not isinstance(objective, Distillation) or objective.section.scores is None:
        return batches
    return with_scores(batches, StoredScores.open(Path(objective.section.scores)))


def first_moments(engine: Engine) -> dict[str, torch.Tensor]:
    """Adam's first moment of each trained parameter by name, in fp32 on the CPU.

    Only the first rank of each pipeline stage has all moments of its stage.
    """
    moments = {}
    for name, param in engine.lm.named_parameters():
        assert isinstance(param, nn.Parameter)
        if param.requires_grad:
            moments[name] = engine.gather_shards(name, engine.state.first_moment(param)).clone().cpu()
    return moments


def first_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """The gradients of the first step by parameter name, computed from Adam's first moments.

    After one step, a first moment is (1 - beta1) times the gradient.
    """
    return of_all_stages(engine, {name: moment / (1 - BETAS[0]) for name, moment in first_moments(engine).items()})


def _later_gradients(engine: Engine, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of adapters in the second step, computed from Adam's first moments after it.

    They are beta1 times the moments `before` x (1 - beta1), plus (1 - beta1) times the gradients.
    """
    if not any(map(is_adapter, before)):
        return {}
    moments = of_all_stages(engine, first_moments(engine))
    return {
        name: moment / (1 - BETAS[0]) - BETAS[0] * before[name] for name, moment in moments.items() if is_adapter(name)
    }


def of_all_stages(engine: Engine, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, by parameter name, of the first ranks of all pipeline stages; collective with several."""
    mesh = engine.plan.mesh
    if mesh.pp == 1:
        return tensors
    stages = all_gather_object(tensors if mesh.rank == mesh.leader else {})
    for earlier, later in itertools.combinations(stages, 2):
        assert all(torch.equal(earlier[name], later[name]) for name in earlier.keys() & later.keys()), (
            "tied weights have two gradients"
        )
    return {name: tensor for stage in stages for name, tensor in stage.items()}
