"""Run many cells of objectives on scores inside one launched world.

Started by the tests as `torchrun --nproc-per-node N score_worker.py MODELS_DIR OUT_DIR CELLS.json`.
"""

import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import BatchPlan, eval_batches, training_batches
from ds_finetune.engine.default_group import process_group
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.selftest.reference_loop import LR
from ds_finetune.selftest.steps import _gradients, batch_plan
from ds_finetune.world import World
from tests.parity.scoring import STEPS, ScoreCell, rows
from tests.planning import model_of


def main() -> None:
    """Run every cell; rank zero writes the results."""
    models, out, cells = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for number, cell in enumerate(ScoreCell(**tree) for tree in cells):
            config = RunConfig.model_validate(cell.tree(models / cell.folder, out, ranks=world.world_size))
            plan = make_plan(config, world=world, device=device)
            with start_engine(plan, model_of(config)) as engine:
                found = _run(engine, cell)
            if world.rank == 0:
                torch.save(found, out / f"{cell.name}-world={world.world_size}.pt")
            if number == 0:
                gc.freeze()


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
            found["gradients"] = _gradients(engine)
    return found


def _batch_plan(engine: Engine) -> BatchPlan:
    return replace(batch_plan(engine.plan), documents_per_unit=engine.objective.documents_per_unit)


if __name__ == "__main__":
    main()
    exit_process()
