"""Run every objective in many layouts inside one launched world: an evaluation and a step each.

Started by the tests as `torchrun --nproc-per-node N objective_worker.py MODELS_DIR OUT_DIR LAYOUTS.json`.
"""

from dataclasses import replace
from typing import Any

import torch

from ds_finetune.data.batches import Batch, BatchPlan, MicroBatch, eval_baseline, eval_batches, training_batches
from ds_finetune.data.prepared_rows import Row
from ds_finetune.engine.engine import Engine
from ds_finetune.model.loss.token_loss import LossHead
from ds_finetune.objectives.objective import Objective, make_objective
from ds_finetune.reference.selftest.cells import Cell
from ds_finetune.reference.selftest.compare import batch_plan, first_gradients
from ds_finetune.reference.selftest.reference_loop import BETAS
from tests.parity.objective_cells import LR, OBJECTIVES, Layout, layout_tree, mismatched, reference_of, rows, section
from tests.parity.serving import Launched, serve


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """An evaluation and a step of each objective in a layout."""
    layout = Layout(**tree | {"cell": Cell(**tree["cell"])})
    with launched.engine(layout_tree(layout, launched.models / layout.cell.family, launched.out)) as engine:
        return layout.name, _run(engine, layout)


def _run(engine: Engine, layout: Layout) -> dict[str, Any]:
    objective, moments = make_objective(section(OBJECTIVES[0])), dict[str, torch.Tensor]()
    found: dict[str, Any] = {"objectives": []}
    if layout.has_lora:
        # After one step the second factors are no longer zeros.
        _set_objective(engine, objective)
        engine.step(_batch(engine, objective), lr=LR)
        moments = first_gradients(engine)
        found["adapters"] = {name: tensor.clone() for name, tensor in engine.adapters() if tensor is not None}
    for number in layout.objectives:
        objective = make_objective(section(OBJECTIVES[number]))
        if layout.has_lora and objective.needs_reference:
            objective.reference_from_adapters = True
        _set_objective(engine, objective)
        results = _results(engine, objective)
        # Adam's first moment is the running mean of the gradients of all steps.
        moments, before = first_gradients(engine), moments
        gradients = {name: moment - BETAS[0] * before.get(name, 0) for name, moment in moments.items()}
        found["objectives"].append(results | {"gradients": gradients})
    plan = replace(batch_plan(engine.plan), documents_per_unit=2)
    every = rows(2, packing=engine.plan.data.packing)
    numbers, logps = engine.document_log_probs(eval_batches(every, plan))
    return found | {"numbers": numbers.tolist(), "logps": logps.tolist()}


def _set_objective(engine: Engine, objective: Objective) -> None:
    """Let the engine and the head, where this stage has it, compute another objective from now on."""
    engine.objective = objective
    head = engine.lm.get_output_embeddings()
    if isinstance(head, LossHead):
        head.objective = objective


def _results(engine: Engine, objective: Objective) -> dict[str, Any]:
    """Loss, metrics and norm of a step that leaves the weights as they are, and the held-out loss of all rows."""
    every, plan = _rows_and_plan(engine, objective)
    baseline = eval_baseline(mismatched(packing=engine.plan.data.packing), plan) if objective.needs_baseline else ()
    evaluated = engine.evaluate(map(_with_reference, eval_batches(every, plan)), baseline=map(_refer, baseline))
    assert evaluated is not None
    result = engine.step(_batch(engine, objective), lr=0.0)
    return {"loss": result.loss, "metrics": dict(result.metrics), "norm": result.grad_norm, "eval": evaluated.loss}


def _batch(engine: Engine, objective: Objective) -> Batch:
    """This rank's share of a batch of all documents."""
    every, plan = _rows_and_plan(engine, objective)
    other = mismatched(packing=engine.plan.data.packing) if objective.needs_baseline else None
    (batch,) = training_batches(every, plan, start_step=0, total_rows=len(every), mismatched=other)
    return _with_reference(batch)


def _rows_and_plan(engine: Engine, objective: Objective) -> tuple[list[Row], BatchPlan]:
    """Rows of all documents, and a batch that holds them in as many forwards as the engine's plan has."""
    every = rows(objective.documents_per_unit, packing=engine.plan.data.packing)
    plan = replace(batch_plan(engine.plan), documents_per_unit=objective.documents_per_unit)
    share = plan.dp * engine.plan.accumulation
    size = -(-len(every) // share)
    return every, replace(plan, global_batch_size=size * share, micro_batch_size=size)


def _with_reference(batch: Batch) -> Batch:
    return replace(batch, micro=tuple(map(_refer, batch.micro)), baseline=tuple(map(_refer, batch.baseline)))


def _refer(micro: MicroBatch) -> MicroBatch:
    assert micro.examples is not None
    made_up = [reference_of(number) for number in micro.examples.numbers.tolist()]
    return replace(micro, examples=replace(micro.examples, reference=torch.tensor(made_up, dtype=torch.float64)))


if __name__ == "__main__":
    serve(run)
