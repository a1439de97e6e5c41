"""Run many cells inside one launched world: a few optimizer steps each.

Started by the tests as `torchrun --nproc-per-node N worker.py MODELS_DIR OUT_DIR CELLS.json`.
"""

from dataclasses import asdict
from typing import Any

from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.reference.selftest.compare import take_steps
from tests.parity.serving import Launched, serve

STEPS = 3


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """The first steps of a cell, and the weights after them."""
    cell, ranks = Cell(**tree), launched.world.world_size
    run_file = run_tree(cell, launched.models / cell.family, launched.out, dp=ranks // cell.sharing)
    with launched.engine(run_file) as engine:
        *_, steps = take_steps(engine, STEPS)
        weights = {name: tensor.clone() for name, tensor in engine.tensors() if tensor is not None}
        return f"{cell.name}-world={ranks}", asdict(steps) | {"weights": weights}


if __name__ == "__main__":
    serve(run)
