"""Started by the tests as `torchrun --nproc-per-node N edge_worker.py FOLDER`: one step of DeepSeek-V4 in each of the
folder's cells, in one world.
"""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import training_batches
from ds_finetune.data.prepared_rows import Row
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.compare import batch_plan, first_gradients
from ds_finetune.reference.selftest.reference_loop import BETAS
from ds_finetune.system.world import World
from tests.planning import model_of

LENGTH = 80
Lengths = tuple[tuple[int, ...], ...]
"""Tokens of the documents of rows."""


class EdgeCell(NamedTuple):
    """One step of a layout on rows of documents."""

    model: str
    """A folder's name."""
    parallel: dict[str, int]
    rows: Lengths
    stage: int = 1
    packing: bool = True


def token_ids(rows: Lengths) -> list[torch.Tensor]:
    """The tokens of each row."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 90, (sum(lengths),), generator=generator) for lengths in rows]


def main() -> None:
    """Do one step of every cell in one world."""
    folder = Path(sys.argv[1])
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for name, *values in json.loads((folder / "cells.json").read_text()):
            cell = EdgeCell(*values)
            config = _config(folder / cell.model, cell)
            plan = make_plan(RunSettings.of(config), world=world, device=device)
            rows = [_row(ids, lengths) for ids, lengths in zip(token_ids(cell.rows), cell.rows, strict=True)]
            with start_engine(plan, model_of(config)) as engine:
                (batch,) = training_batches(rows, batch_plan(plan), start_step=0, total_rows=len(rows))
                loss = engine.step(batch, lr=1e-3).loss
                gradients = first_gradients(engine)
            if world.rank == 0:
                torch.save({"loss": loss, "gradients": gradients}, folder / name)


def _config(model: Path, cell: EdgeCell) -> RunConfig:
    zero = {"stage": cell.stage, "stage3_param_persistence_threshold": 40}
    train = {"precision": "fp32", "global_batch_size": len(cell.rows), "micro_batch_size": 1, "max_seq_len": LENGTH}
    return RunConfig.model_validate(
        {
            "model": str(model),
            "data": {"train": "none", "packing": cell.packing, "shuffle": False},
            "output_dir": "none",
            "parallel": cell.parallel,
            "deepspeed": {"zero_optimization": zero},
            "optim": {"betas": list(BETAS)},
            "train": {**train, "max_grad_norm": 0},
        }
    )


def _row(ids: torch.Tensor, lengths: tuple[int, ...]) -> Row:
    """All tokens are supervised that have one before them in their document."""
    parts = [part.numpy().astype(np.int32) for part in ids.split(list(lengths))]
    labels = [np.append(part[1:], np.int32(IGNORE_INDEX)) for part in parts]
    positions = [np.arange(len(part), dtype=np.int32) for part in parts]
    return Row(*map(np.concatenate, (parts, positions, labels)), len(ids) - len(lengths))


if __name__ == "__main__":
    main()
    exit_process()
