"""Take optimizer steps of many cells in one launched world, and count the host's waits in the last step of each.

Started by the tests as `torchrun --nproc-per-node N waits_worker.py OUT_DIR CELLS.json`.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.collectives import all_gather_object
from ds_finetune.engine.default_group import process_group
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.selftest.steps import whole_batch
from ds_finetune.world import World
from tests.host_waits import imagined_accelerator
from tests.planning import model_of


def main() -> None:
    """Run every cell; rank zero writes what each rank waited for."""
    out, cells = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for number, (name, tree) in enumerate(cells.items()):
            found = all_gather_object(_waits_of_a_step(RunConfig.model_validate(tree), world, device))
            if world.rank == 0:
                (out / f"{name}.json").write_text(json.dumps(found))
            if number == 0:
                gc.freeze()


def _waits_of_a_step(config: RunConfig, world: World, device: str) -> dict[str, int]:
    plan, model = make_plan(config, world=world, device=device), model_of(config)
    with imagined_accelerator() as waits, start_engine(plan, model) as engine:
        for _ in range(2):
            batch: Any = whole_batch(engine)
            waits.put_on_host(batch)
            waits.reset()
            engine.step(batch, lr=1e-3)
        return dict(waits.found)


if __name__ == "__main__":
    main()
    exit_process()
