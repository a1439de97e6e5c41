"""Optimizer steps of an engine on the samples, and the gradients it took them with."""

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from ds_finetune.data.batches import Batch, BatchPlan, eval_batches, training_batches
from ds_finetune.engine.collectives import all_gather_object
from ds_finetune.engine.engine import Engine
from ds_finetune.plan.plan import Plan
from ds_finetune.selftest.cells import rows
from ds_finetune.selftest.reference_loop import BETAS, LIMITS, LR, PROMPTS, Steps


def batch_plan(plan: Plan) -> BatchPlan:
    """How the samples are shared out."""
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
    )


def take_steps(engine: Engine, steps: int) -> Iterator[Steps]:
    """Step after step on all samples; what is yielded grows, with gradients from the first step on where they can be
    read, and answers at last.
    """
    plan, found = engine.plan, Steps()
    for step in range(steps):
        result = engine.step(_whole_batch(plan), lr=LR)
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
        if step == 0 and plan.optimizer.name == "adamw" and plan.precision == "fp32":
            found.gradients = _gradients(engine)
        if step == steps - 1:
            answers = engine.generate(PROMPTS, LIMITS)
            assert answers is not None
            found.answers = answers
        yield found


def eval_loss(engine: Engine) -> float:
    """Mean loss over the samples."""
    found = engine.evaluate(eval_batches(rows(engine.plan.batch.is_packed), batch_plan(engine.plan)))
    assert found is not None
    return found.loss


def _whole_batch(plan: Plan) -> Batch:
    every = rows(plan.batch.is_packed)
    return next(iter(training_batches(every, batch_plan(plan), start_step=0, total_rows=len(every))))


def first_moments(engine: Engine) -> dict[str, torch.Tensor]:
    """Adam's first moment of each trained parameter by name, fp32 on the CPU; whole on the first rank of each pipeline
    stage.
    """
    found = {}
    for name, param in engine.lm.named_parameters():
        assert isinstance(param, nn.Parameter)
        if param.requires_grad:
            found[name] = engine.gather_shards(name, engine.state.first_moment(param)).clone().cpu()
    return found


def _gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Gradient of the first step by parameter name, on the first rank of each pipeline stage: Adam's first moment is (1
    - beta1) times it.
    """
    found = {name: moment / (1 - BETAS[0]) for name, moment in first_moments(engine).items()}
    mesh = engine.plan.mesh
    if mesh.pp == 1:
        return found
    stages = all_gather_object(found if mesh.rank == mesh.leader else {})
    for earlier, later in itertools.combinations(stages, 2):
        assert all(torch.equal(earlier[name], later[name]) for name in earlier.keys() & later.keys()), (
            "tied weights have two gradients"
        )
    return {name: grad for stage in stages for name, grad in stage.items()}
