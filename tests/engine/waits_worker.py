"""Take optimizer steps of many cells in one launched world, and count the host's waits in the last step of each.

Started by the tests as `torchrun --nproc-per-node N waits_worker.py OUT_DIR CELLS.json`.
"""

import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import Batch, training_batches
from ds_finetune.engine import rank_rows
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import rows
from ds_finetune.reference.selftest.compare import batch_plan, whole_batch
from ds_finetune.system.world import World
from tests.host_waits import imagined_accelerator
from tests.planning import model_of

STEPS = 3


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
    # DeepSpeed's optimizers synchronize where they are freed; that of the last cell must not be freed in a counted step.
    gc.collect()
    plan, model = _with_pinned_memory(make_plan(RunSettings.of(config), world=world, device=device)), model_of(config)
    with (
        imagined_accelerator() as waits,
        patch.object(rank_rows, "pins_memory", lambda _: True),
        start_engine(plan, model) as engine,
    ):
        # A model for a GPU is built there; this one was built on the host.
        for tensor in (*engine.lm.parameters(), *engine.lm.buffers()):
            waits.move_to_device(tensor)
        if (stage := engine._stage) is not None:
            waits.move_to_device(stage.no_hidden_states)
        # ZeRO-3 compares the order of modules over ranks in its first steps.
        for _ in range(STEPS):
            batch = _batch(engine, looks_ahead=config.mtp.train)
            waits.put_on_host(batch)
            prepared = engine.prepare(batch)
            waits.reset()
            engine.step(prepared, lr=1e-3)
        return dict(waits.found)


def _with_pinned_memory(plan: Plan) -> Plan:
    """The plan as it is for a GPU: what is offloaded lies in pinned memory."""
    zero = plan.deepspeed["zero_optimization"]
    offloads = {key: section | {"pin_memory": True} for key, section in zero.items() if key.startswith("offload_")}
    return replace(plan, deepspeed=plan.deepspeed | {"zero_optimization": zero | offloads})


def _batch(engine: Engine, *, looks_ahead: bool) -> Batch:
    if not looks_ahead:
        return whole_batch(engine)
    every, plan = rows(engine.plan.batch.is_packed), replace(batch_plan(engine.plan), looks_ahead=True)
    return next(training_batches(every, plan, start_step=0, total_rows=len(every)))


if __name__ == "__main__":
    main()
    exit_process()
