"""Started by the tests as `torchrun --nproc-per-node 2 logits_worker.py MODEL OUT`: the logits every layout gives of
the same prompts, `OUT/LAYOUT.npy`.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.system.world import World
from tests.planning import model_of

PROMPTS = [[5, 9, 40, 41, 7], [80], list(range(3, 35))]
LAYOUTS = {
    **{f"zero{stage}": Cell("deepseek_v3", stage, 1, packing=False) for stage in (0, 1, 2, 3)},
    "zero3-packed-checkpointing": Cell("deepseek_v3", 3, 1, packing=True, checkpointing=True),
    "tp": Cell("deepseek_v3", 2, 1, packing=False, tp=2),
    "sp": Cell("deepseek_v3", 3, 1, packing=False, sp=2),
    "ep": Cell("deepseek_v3", 1, 1, packing=False, ep=2),
    "pp": Cell("deepseek_v3", 1, 1, packing=False, pp=2),
}


def main() -> None:
    """Do every layout; the ranks must agree."""
    world, device = World.from_environment(os.environ), choose_device()
    model, out = map(Path, sys.argv[1:])
    with process_group(world, device):
        for name, cell in LAYOUTS.items():
            config = RunConfig.model_validate(run_tree(cell, model, out, dp=world.world_size // cell.sharing))
            with start_engine(
                make_plan(RunSettings.of(config), world=world, device=device), model_of(config)
            ) as engine:
                logits = torch.cat(list(engine.logits(PROMPTS))).cpu()
            np.save(out / f"{name}-{world.rank}.npy", logits.numpy())


if __name__ == "__main__":
    main()
    exit_process()
