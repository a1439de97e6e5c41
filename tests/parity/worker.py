"""Run many cells inside one launched world: a few optimizer steps each.

Started by the tests as `torchrun --nproc-per-node N worker.py MODELS_DIR OUT_DIR CELLS.json`.
"""

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.default_group import process_group
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.model.model_plan import ModelPlan
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.selftest.cells import Cell, run_tree
from ds_finetune.selftest.steps import take_steps
from ds_finetune.world import World
from tests.planning import model_of

STEPS = 3


def main() -> None:
    """Run every cell; rank zero writes the results."""
    models, out, cells = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for number, cell in enumerate(Cell(**tree) for tree in cells):
            config = RunConfig.model_validate(
                run_tree(cell, models / cell.family, out, dp=world.world_size // cell.sharing)
            )
            found = _run(make_plan(config, world=world, device=device), model_of(config))
            if world.rank == 0:
                torch.save(found, out / f"{cell.name}-world={world.world_size}.pt")
            if number == 0:
                # ZeRO-3 collects garbage at each start, which takes 0.7 of 1.7 s of a cell; this excludes everything
                # imported so far.
                gc.freeze()


def _run(plan: Plan, model: ModelPlan) -> dict[str, Any]:
    with start_engine(plan, model) as engine:
        *_, steps = take_steps(engine, STEPS)
        weights = {name: tensor.clone() for name, tensor in engine.tensors() if tensor is not None}
        return asdict(steps) | {"weights": weights}


if __name__ == "__main__":
    main()
    exit_process()
