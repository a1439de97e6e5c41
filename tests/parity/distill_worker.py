"""Run many distillations inside one launched world: a few optimizer steps each.

Started by the tests as `torchrun --nproc-per-node N distill_worker.py FOLDER OUT_DIR CELLS.json`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_finetune.data.batches import Batch, eval_batches, training_batches
from ds_finetune.data.teacher_scores import StoredScores, with_scores
from ds_finetune.engine.engine import Engine
from ds_finetune.reference.selftest.cells import run_tree
from ds_finetune.reference.selftest.compare import batch_plan, first_gradients
from ds_finetune.reference.selftest.reference_loop import LR
from tests.parity.distillation import STEPS, Distilled, numbered_rows, of_tree
from tests.parity.serving import Launched, serve


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """The first steps of a distillation, and an evaluation before them."""
    distilled, folder, ranks = of_tree(tree), launched.models, launched.world.world_size
    cell = distilled.cell
    run_file = run_tree(cell, folder / cell.family, launched.out, dp=ranks // cell.sharing) | distilled.sections(folder)
    with launched.engine(run_file) as engine:
        return f"{distilled.name}-world={ranks}", _run(engine, distilled, folder)


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
            gradients = first_gradients(engine) if engine.plan.precision == "fp32" else {}
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "metrics": metrics,
        "evaluated": dict(evaluated.metrics),
    }


def _batches(engine: Engine, distilled: Distilled, folder: Path, *, is_training: bool) -> list[Batch]:
    """All samples, to train on or to evaluate."""
    rows = numbered_rows(engine.plan.data.packing)
    shares = replace(batch_plan(engine.plan), documents_per_unit=engine.objective.documents_per_unit)
    batches = (
        training_batches(rows, shares, start_step=0, total_rows=len(rows))
        if is_training
        else eval_batches(rows, shares)
    )
    return list(with_scores(batches, StoredScores.open(folder / "scores")) if distilled.source == "stored" else batches)


if __name__ == "__main__":
    serve(run)
