"""Train a multi-token prediction layer in many layouts inside one launched world.

Started by the tests as `torchrun --nproc-per-node N mtp_worker.py MODELS_DIR OUT_DIR LAYOUTS.json`.
"""

import itertools
from typing import Any

import torch

from ds_finetune.data.batches import eval_batches, training_batches
from ds_finetune.engine.engine import Engine
from ds_finetune.reference.selftest.cells import Cell, rows
from ds_finetune.reference.selftest.compare import batch_plan, first_gradients
from tests.parity.mtp_cells import LR, STEPS, MtpLayout, mtp_tree
from tests.parity.serving import Launched, serve


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """The first steps of a layout, and where they are compared its weights without multi-token prediction."""
    layout = MtpLayout(**tree | {"cell": Cell(**tree["cell"])})
    run_file = mtp_tree(layout, launched.models / layout.cell.family, launched.out)
    found = _run(run_file, launched, predicts=True)
    if layout.detach and layout.is_compared:
        found["without"] = _run(run_file | {"mtp": {}}, launched, predicts=False)["weights"]
    return layout.name, found


def _run(run_file: dict[str, Any], launched: Launched, *, predicts: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"metrics": [], "norms": []}
    with launched.engine(run_file) as engine:
        plan = batch_plan(engine.plan)
        every = rows(engine.plan.data.packing)
        if predicts:
            evaluated = engine.evaluate(eval_batches(every, plan))
            assert evaluated is not None
            found["eval"] = dict(evaluated.metrics)
        for step in range(STEPS):
            (batch,) = training_batches(every, plan, start_step=0, total_rows=len(every))
            result = engine.step(batch, lr=LR)
            found["metrics"].append(dict(result.metrics))
            found["norms"].append(result.grad_norm)
            if step == 0 and engine.plan.precision == "fp32" and predicts:
                found["gradients"] = first_gradients(engine)
        return found | {"weights": _weights(engine)}


def _weights(engine: Engine) -> dict[str, torch.Tensor]:
    every = itertools.chain(engine.tensors(), engine.adapters())
    return {name: tensor.clone() for name, tensor in every if tensor is not None}


if __name__ == "__main__":
    serve(run)
