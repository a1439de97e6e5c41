"""Take steps with policies of routers in many layouts inside one launched world.

Started by the tests as `torchrun --nproc-per-node N router_worker.py MODELS_DIR OUT_DIR LAYOUTS.json`.
"""

from typing import Any

import torch

from ds_finetune.data.batches import eval_batches, training_batches
from ds_finetune.engine.engine import Engine
from ds_finetune.reference.selftest.cells import Cell, rows
from ds_finetune.reference.selftest.compare import batch_plan, first_gradients
from ds_finetune.reference.selftest.reference_loop import BETAS
from tests.parity.router_cells import STEPS, RouterLayout, config_of
from tests.parity.serving import Launched, serve


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """Steps of a layout, and an evaluation before them."""
    layout = RouterLayout(**tree | {"cell": Cell(**tree["cell"])})
    with launched.engine(config_of(layout, launched.models / layout.cell.family, launched.out)) as engine:
        return layout.name, _run(engine)


def _run(engine: Engine) -> dict[str, Any]:
    """Results of steps that leave the weights as they are, and of an evaluation before them."""
    every = rows(engine.plan.data.packing, engine.objective.documents_per_unit)
    plan = batch_plan(engine.plan, engine.objective)
    (batch,) = training_batches(every, plan, start_step=0, total_rows=len(every))
    evaluated = engine.evaluate(eval_batches(every, plan))
    assert evaluated is not None
    found: dict[str, Any] = {"eval": dict(evaluated.metrics), "biases": [_biases(engine)], "steps": []}
    moments = dict[str, torch.Tensor]()
    for _ in range(STEPS):
        result = engine.step(batch, lr=0.0)
        found["biases"].append(_biases(engine))
        found["steps"].append({"metrics": dict(result.metrics), "norm": result.grad_norm, "skipped": result.skipped})
        found["steps"][-1]["counts"] = result.counted["routers"].counts
        found["steps"][-1]["tokens"] = result.counted["routers"].num_tokens
        if engine.plan.precision == "fp32":
            # Adam's first moment is the running mean of the gradients of all steps.
            moments, before = first_gradients(engine), moments
            found["steps"][-1]["gradients"] = {
                name: moment - BETAS[0] * before.get(name, 0) for name, moment in moments.items()
            }
    return found


def _biases(engine: Engine) -> dict[str, torch.Tensor]:
    every = ((name, tensor) for name, tensor in engine.tensors() if tensor is not None)
    return {name: tensor.clone() for name, tensor in every if name.endswith("e_score_correction_bias")}


if __name__ == "__main__":
    serve(run)
