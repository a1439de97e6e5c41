"""Started by the tests as `torchrun --nproc-per-node 2 odd_worker.py FOLDER CELLS.json`: one step on odd data in each
cell, in one world.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import eval_batches, training_batches
from ds_finetune.data.documents import Documents, TokenisedDocument
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.compare import batch_plan, first_gradients
from ds_finetune.reference.selftest.reference_loop import BETAS
from ds_finetune.system.world import World
from tests.planning import model_of

ROW = 16
Document = tuple[list[int], list[bool]]
LONG = list(range(20, 20 + ROW))
SHAPES: dict[str, list[Document]] = {
    "two-tokens": [([5, 6], [False, True])],
    "first-token-of-a-row": [(LONG, [False, True] + [False] * (ROW - 2))],
    "last-token-of-a-row": [(LONG, [False] * (ROW - 1) + [True])],
    "whole-rows": [(LONG, [True] * ROW), (LONG[::-1], [True] * ROW), (LONG, [False] * 8 + [True] * 8)],
}
"""Documents of one step of four rows, so that some forwards and ranks have nothing, by name."""
LAYOUTS: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("deepseek_v3", 0, {}),
    ("deepseek_v3", 1, {}),
    ("deepseek_v3", 2, {}),
    ("deepseek_v3", 3, {}),
    ("deepseek_v3", 3, {"tp": 2}),
    ("deepseek_v3", 3, {"sp": 2}),
    ("deepseek_v3", 3, {"ep": 2}),
    ("deepseek_v3", 1, {"pp": 2}),
    ("qwen2", 2, {"tp": 2}),
    ("qwen2", 1, {"pp": 2}),
)
"""Family, ZeRO stage and sizes; the embedding of qwen2 is tied."""


class OddCell(NamedTuple):
    """One step of a layout on a shape."""

    family: str
    stage: int
    parallel: dict[str, int]
    shape: str
    packing: bool

    @property
    def name(self) -> str:
        """A name for files and test ids."""
        sizes = [f"{axis}{size}" for axis, size in self.parallel.items()]
        return "-".join([self.family, f"zero{self.stage}", *sizes, self.shape, "packed" if self.packing else "padded"])


def main() -> None:
    """Do one step of every cell in one world."""
    folder, cells = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for cell in (OddCell(*values) for values in cells):
            config = _config(folder / cell.family, cell.stage, cell.parallel, packing=cell.packing)
            plan = make_plan(RunSettings.of(config), world=world, device=device)
            with start_engine(plan, model_of(config)) as engine:
                found = _step(engine, _rows(SHAPES[cell.shape]))
            if world.rank == 0:
                torch.save(found, folder / f"{cell.name}.pt")


def _config(model: Path, stage: int, parallel: dict[str, int], *, packing: bool) -> RunConfig:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 40}
    tree: dict[str, Any] = {
        "model": str(model),
        "data": {"train": "none", "packing": packing, "shuffle": False},
        "output_dir": "none",
    }
    tree |= {"parallel": parallel, "deepspeed": {"zero_optimization": zero}, "optim": {"betas": list(BETAS)}}
    train = {"precision": "fp32", "global_batch_size": 4, "micro_batch_size": 1, "max_seq_len": ROW, "max_grad_norm": 0}
    return RunConfig.model_validate(tree | {"train": train})


def _rows(documents: list[Document]) -> PreparedRows:
    kept = Documents.of([TokenisedDocument(ids, mask) for ids, mask in documents])
    return PreparedRows(kept, np.arange(len(documents)), np.arange(len(documents) + 1), kept.counts)


def _step(engine: Engine, rows: PreparedRows) -> dict[str, Any]:
    evaluated = engine.evaluate(eval_batches(rows, batch_plan(engine.plan)))
    assert evaluated is not None
    (batch,) = training_batches(rows, batch_plan(engine.plan), start_step=0, total_rows=len(rows))
    result = engine.step(batch, lr=1e-3)
    found = {
        "loss": result.loss,
        "norm": result.grad_norm,
        "supervised": result.num_supervised_tokens,
        "eval": evaluated.loss,
    }
    return found | {"gradients": first_gradients(engine)}


if __name__ == "__main__":
    main()
    exit_process()
