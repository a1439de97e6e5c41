"""Train a multi-token prediction layer in many layouts inside one launched world.

Started by the tests as `torchrun --nproc-per-node N mtp_worker.py MODELS_DIR OUT_DIR LAYOUTS.json`.
"""

import gc
import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import eval_batches, training_batches
from ds_finetune.engine.default_group import process_group
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.selftest.cells import Cell, rows
from ds_finetune.selftest.steps import _gradients, batch_plan
from ds_finetune.world import World
from tests.parity.mtp_cells import LR, STEPS, MtpLayout, mtp_tree
from tests.planning import model_of


def main() -> None:
    """Run every layout; rank zero writes the results."""
    models, out, given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for number, tree in enumerate(given):
            layout = MtpLayout(**tree | {"cell": Cell(**tree["cell"])})
            run_file = mtp_tree(layout, models / layout.cell.family, out)
            found = _run(run_file, world, device)
            if layout.detach and layout.is_compared:
                found["without"] = _run(run_file | {"mtp": {}}, world, device)["weights"]
            if world.rank == 0:
                torch.save(found, out / f"{layout.name}.pt")
            if number == 0:
                # What was imported is looked through no more: ZeRO-3 collects garbage at each start.
                gc.freeze()


def _run(tree: dict[str, Any], world: World, device: str) -> dict[str, Any]:
    config = RunConfig.model_validate(tree)
    found: dict[str, Any] = {"metrics": [], "norms": []}
    with start_engine(make_plan(config, world=world, device=device), model_of(config)) as engine:
        plan = replace(batch_plan(engine.plan), looks_ahead=config.mtp.train)
        every = rows(engine.plan.batch.is_packed)
        if config.mtp.train:
            evaluated = engine.evaluate(eval_batches(every, plan))
            assert evaluated is not None
            found["eval"] = dict(evaluated.metrics)
        for step in range(STEPS):
            (batch,) = training_batches(every, plan, start_step=0, total_rows=len(every))
            result = engine.step(batch, lr=LR)
            found["metrics"].append(dict(result.metrics))
            found["norms"].append(result.grad_norm)
            if step == 0 and config.train.precision == "fp32" and config.mtp.train:
                found["gradients"] = _gradients(engine)
        return found | {"weights": _weights(engine)}


def _weights(engine: Engine) -> dict[str, torch.Tensor]:
    every = itertools.chain(engine.tensors(), engine.adapters())
    return {name: tensor.clone() for name, tensor in every if tensor is not None}


if __name__ == "__main__":
    main()
    exit_process()
