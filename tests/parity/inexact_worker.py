"""Takes three steps under inexact options of DeepSpeed where they are exact, in one launched world.

Started by the tests as `torchrun --nproc-per-node 4 inexact_worker.py MODELS_DIR OUT_DIR`.
"""

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.reference.selftest.compare import eval_loss, take_steps
from ds_finetune.system.world import World
from tests.planning import model_of

STEPS = 3
ZENFLOW = {"select_strategy": "step", "select_interval": 4, "update_interval": 2, "full_warm_up_rounds": 2 * STEPS}
CELLS: dict[str, tuple[Cell, dict[str, Any]]] = {
    "hierarchical_partition": (Cell("deepseek_v3", 3, 4, True), {"zero_hpz_partition_size": 2}),
    # ZenFlow updates all weights in each step while it warms up.
    "zenflow": (Cell("llama", 2, 1, True, offload="optimizer", max_grad_norm=0.5), {"zenflow": ZENFLOW}),
}
"""A cell and what is added to its section `zero_optimization`, by the name of the option."""


def main() -> None:
    """Run every cell; rank zero writes the results."""
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for name, (cell, options) in CELLS.items():
            tree = run_tree(cell, models / cell.family, out, dp=world.world_size)
            tree["deepspeed"]["zero_optimization"] |= options
            config = RunConfig.model_validate(tree | {"inexact": name, "checkpoint": {"every": "never"}})
            with start_engine(
                make_plan(RunSettings.of(config), world=world, device=device), model_of(config)
            ) as engine:
                # Answers after the first step, whose weights the second step trains on.
                (first,) = take_steps(engine, 1)
                *_, rest = take_steps(engine, STEPS - 1)
                eval_loss(engine)
                params = list(engine.lm.parameters())
                copies = [getattr(param, "ds_secondary_tensor", None) for param in params]
                held = {"second_bytes": sum(copy.nbytes for copy in copies if copy is not None)}
                held |= {"numel": sum(getattr(param, "ds_numel", 0) for param in params)}
                every = replace(rest, losses=first.losses + rest.losses, norms=first.norms + rest.norms)
                if world.rank == 0:
                    torch.save(asdict(replace(every, gradients=first.gradients)) | held, out / f"{name}.pt")


if __name__ == "__main__":
    main()
    exit_process()
