"""Train indexers in many layouts inside one launched world.

Started by the tests as `torchrun --nproc-per-node N indexer_worker.py MODELS_DIR OUT_DIR LAYOUTS.json`.
"""

from typing import Any

from ds_finetune.data.batches import eval_batches, training_batches
from ds_finetune.reference.selftest.cells import Cell, rows
from ds_finetune.reference.selftest.compare import batch_plan, first_gradients
from tests.parity.indexer_cells import LR, STEPS, IndexerLayout, indexer_tree
from tests.parity.serving import Launched, serve


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """The first steps of a layout, and where they are compared its weights without training indexers."""
    layout = IndexerLayout(**tree | {"cell": Cell(**tree["cell"])})
    run_file = indexer_tree(layout, launched.models / layout.cell.family, launched.out)
    found = _run(run_file, launched)
    if layout.is_compared:
        frozen = _run(run_file | {"indexer": {}}, launched)
        found |= {"frozen": frozen["weights"], "frozen_gradients": frozen["gradients"]}
    return layout.name, found


def _run(run_file: dict[str, Any], launched: Launched) -> dict[str, Any]:
    found: dict[str, Any] = {"metrics": [], "norms": []}
    with launched.engine(run_file) as engine:
        plan, every = batch_plan(engine.plan), rows(engine.plan.data.packing)
        evaluated = engine.evaluate(eval_batches(every, plan))
        assert evaluated is not None
        found["eval"] = dict(evaluated.metrics)
        for step in range(STEPS):
            (batch,) = training_batches(every, plan, start_step=0, total_rows=len(every))
            result = engine.step(batch, lr=LR)
            found["metrics"].append(dict(result.metrics))
            found["norms"].append(result.grad_norm)
            if step == 0 and engine.plan.precision == "fp32":
                found["gradients"] = first_gradients(engine)
        return found | {"weights": {name: tensor.clone() for name, tensor in engine.tensors() if tensor is not None}}


if __name__ == "__main__":
    serve(run)
