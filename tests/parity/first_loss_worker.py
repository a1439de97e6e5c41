"""The first loss of DPO in many layouts, in bf16. Started by the tests as `torchrun --nproc-per-node N
first_loss_worker.py MODELS_DIR OUT.json LAYOUTS.json`.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import Batch, MicroBatch, training_batches
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell
from ds_finetune.reference.selftest.compare import batch_plan
from ds_finetune.system.world import World
from tests.parity.objective_cells import Layout, layout_tree, rows
from tests.planning import model_of


def main() -> None:
    """Run every layout; rank zero writes loss, margin and the loss after a step, by name."""
    models, out, given = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    world, device, found = World.from_environment(os.environ), choose_device(), {}
    with process_group(world, device):
        for tree in given:
            layout = Layout(**tree | {"cell": Cell(**tree["cell"])})
            objective = {"name": "dpo", "reference": "adapters_off" if layout.has_lora else "cache"}
            run_file = layout_tree(layout, models / layout.cell.family, out) | {"objective": objective}
            config = RunConfig.model_validate(run_file)
            with start_engine(
                make_plan(RunSettings.of(config), world=world, device=device), model_of(config)
            ) as engine:
                found[layout.name] = _losses(engine, has_reference=not layout.has_lora)
    if world.rank == 0:
        out.write_text(json.dumps(found))


def _losses(engine: Engine, *, has_reference: bool) -> dict[str, float]:
    plan = replace(batch_plan(engine.plan), documents_per_unit=2)
    every = rows(2, packing=engine.plan.data.packing)
    (batch,) = training_batches(every, plan, start_step=0, total_rows=len(every))
    if has_reference:
        numbers, logps = engine.document_log_probs([batch])
        batch = _with_reference(batch, dict(zip(numbers.tolist(), logps.tolist(), strict=True)))
    first = engine.step(batch, lr=1e-2)
    second = engine.step(batch, lr=0.0)
    return {"first": first.loss, "margin": first.metrics["reward_margin"], "second": second.loss}


def _with_reference(batch: Batch, logps: dict[int, float]) -> Batch:
    def refer(micro: MicroBatch) -> MicroBatch:
        assert micro.examples is not None
        reference = torch.tensor([logps[number] for number in micro.examples.numbers.tolist()], dtype=torch.float64)
        return replace(micro, examples=replace(micro.examples, reference=reference))

    return replace(batch, micro=tuple(map(refer, batch.micro)))


if __name__ == "__main__":
    main()
    exit_process()
