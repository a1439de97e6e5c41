"""Run many cells of objectives on scores inside one launched world.

Started by the tests as `torchrun --nproc-per-node N score_worker.py MODELS_DIR OUT_DIR CELLS.json`.
"""

from dataclasses import replace
from typing import Any

from ds_finetune.data.batches import BatchPlan, eval_batches, training_batches
from ds_finetune.engine.engine import Engine
from ds_finetune.reference.selftest.compare import batch_plan, first_gradients
from ds_finetune.reference.selftest.reference_loop import LR
from tests.parity.scoring import STEPS, ScoreCell, rows
from tests.parity.serving import Launched, serve


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """Steps of a cell, and an evaluation before each."""
    cell, ranks = ScoreCell(**tree), launched.world.world_size
    with launched.engine(cell.tree(launched.models / cell.folder, launched.out, ranks=ranks)) as engine:
        return f"{cell.name}-world={ranks}", _run(engine, cell)


def _run(engine: Engine, cell: ScoreCell) -> dict[str, Any]:
    every = rows(cell.objective, packing=cell.packing)
    plan = _batch_plan(engine)
    head = {name: tensor.clone() for name, tensor in engine.tensors() if tensor is not None and name == "score.weight"}
    found: dict[str, Any] = {"head": head, "steps": [], "gradients": {}}
    for step in range(STEPS):
        held_out = engine.evaluate(eval_batches(every, plan))
        assert held_out is not None
        result = engine.step(next(iter(training_batches(every, plan, start_step=0, total_rows=len(every)))), lr=LR)
        found["steps"].append(
            {"metrics": dict(result.metrics), "norm": result.grad_norm, "held_out": dict(held_out.metrics)}
        )
        if step == 0:
            found["gradients"] = first_gradients(engine)
    return found


def _batch_plan(engine: Engine) -> BatchPlan:
    return replace(batch_plan(engine.plan), documents_per_unit=engine.objective.documents_per_unit)


if __name__ == "__main__":
    serve(run)
