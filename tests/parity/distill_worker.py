"""Run many distillations inside one launched world: a few optimizer steps each.

Started by the tests as `torchrun --nproc-per-node N distill_worker.py FOLDER OUT_DIR CELLS.json`.
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
from ds_finetune.data.batches import Batch, eval_batches, training_batches
from ds_finetune.data.scores import StoredScores, with_scores
from ds_finetune.engine.default_group import process_group
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.selftest.cells import run_tree
from ds_finetune.selftest.reference_loop import LR
from ds_finetune.selftest.steps import _gradients, batch_plan
from ds_finetune.world import World
from tests.parity.distillation import STEPS, Distilled, numbered_rows, of_tree
from tests.planning import model_of


def main() -> None:
    """Run every cell; rank zero writes the results."""
    folder, out, cells = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for number, distilled in enumerate(map(of_tree, cells)):
            cell = distilled.cell
            tree = run_tree(cell, folder / cell.family, out, dp=world.world_size // cell.sharing)
            config = RunConfig.model_validate(tree | distilled.sections(folder))
            with start_engine(make_plan(config, world=world, device=device), model_of(config)) as engine:
                found = _run(engine, distilled, folder)
            if world.rank == 0:
                torch.save(found, out / f"{distilled.name}-world={world.world_size}.pt")
            if number == 0:
                gc.freeze()


def _run(engine: Engine, distilled: Distilled, folder: Path) -> dict[str, Any]:
    losses, norms, gradients = [], [], {}
    evaluated = engine.evaluate(_batches(engine, distilled, folder, is_training=False))
    assert evaluated is not None
    for step in range(STEPS):
        (batch,) = _batches(engine, distilled, folder, is_training=True)
        result = engine.step(batch, lr=LR)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step == 0:
            metrics = dict(result.metrics)
            gradients = _gradients(engine) if engine.plan.precision == "fp32" else {}
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "metrics": metrics,
        "evaluated": dict(evaluated.metrics),
    }


def _batches(engine: Engine, distilled: Distilled, folder: Path, *, is_training: bool) -> list[Batch]:
    """All samples, to train on or to evaluate."""
    rows = numbered_rows(engine.plan.batch.is_packed)
    shares = replace(batch_plan(engine.plan), documents_per_unit=engine.objective.documents_per_unit)
    batches = (
        training_batches(rows, shares, start_step=0, total_rows=len(rows))
        if is_training
        else eval_batches(rows, shares)
    )
    return list(with_scores(batches, StoredScores.open(folder / "scores")) if distilled.source == "stored" else batches)


if __name__ == "__main__":
    main()
    exit_process()
