"""Started by the tests as `torchrun --nproc-per-node N worker.py JOB.json`: save at some layouts, restore at others, in
one world.
"""

import gc
import json
import os
import sys
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from ds_finetune.checkpoint.folder import CheckpointFolder, open_checkpoint_folder
from ds_finetune.checkpoint.restore import newest_checkpoint, restore_engine
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.saver import Saver
from ds_finetune.cli.main import exit_process
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.checkpoint.layouts import AFTER, BEFORE, LR, Layout, batches, config_of
from tests.planning import model_of


def main() -> None:
    """Do the job and let rank zero write what came of it."""
    job = json.loads(Path(sys.argv[1]).read_text())
    world, device = World.from_environment(os.environ), choose_device()
    found: dict[str, Any] = {}
    with process_group(world, device):
        for number, tree in enumerate(job["save"]):
            if number == 1:
                # What was imported is looked through no more: ZeRO-3 collects garbage at each start.
                gc.freeze()
            layout = Layout(**tree)
            found[f"saved {layout.text}@{world.world_size}"] = _save(layout, world, device, job)
        for source, tree in job["restore"]:
            layout = Layout(**tree)
            found[f"{source} -> {layout.text}@{world.world_size}"] = _restore(source, layout, world, device, job)
    if world.rank == 0:
        Path(job["out"]).write_text(json.dumps(found))


def _engine(layout: Layout, world: World, device: str, job: dict[str, Any], *, loads_weights: bool) -> Any:
    config = config_of(
        layout, Path(job["models"]) / layout.family, Path(job["folder"]), dp=world.world_size, disk=Path(job["disk"])
    )
    plan = make_plan(RunSettings.of(config), world=world, device=device)
    return start_engine(plan, model_of(config), loads_weights=loads_weights)


def _place(folder: Path, world: World) -> CheckpointFolder:
    return open_checkpoint_folder(folder, rank=world.rank, node_local=False)


def _steps(engine: Engine, *, start_step: int, steps: int) -> list[dict[str, Any]]:
    done = []
    for batch in batches(engine, start_step=start_step, steps=steps):
        result = engine.step(batch, lr=LR)
        done.append({"loss": result.loss, "norm": result.grad_norm, "rows": list(batch.row_ids)})
    return done


def _weights(engine: Engine) -> list[float]:
    """Three numbers that would differ for other weights: sums, sums of squares, and sums weighted by place."""
    sums = torch.zeros(3, dtype=torch.float64)
    for _, tensor in chain(engine.tensors(), engine.adapters()):
        if tensor is not None:
            flat = tensor.double().view(-1)
            sums += torch.stack(
                [flat.sum(), (flat**2).sum(), (flat * torch.arange(1, len(flat) + 1)).sum() / len(flat)]
            )
    return sums.tolist()


def _save(layout: Layout, world: World, device: str, job: dict[str, Any]) -> dict[str, Any]:
    with _engine(layout, world, device, job, loads_weights=True) as engine:
        groups = engine.state.groups()
        assert (len(groups) > 2) == (layout.optimizer == "nvme"), f"{len(groups)} groups: nothing is swapped"
        before = _steps(engine, start_step=0, steps=BEFORE)
        place = _place(Path(job["folder"]) / f"{layout.text}@{world.world_size}", world)
        saver = Saver(engine.state.groups, place, engine.plan.saves_asynchronously, {})
        with closing(saver):
            saver.start(0)
            state = RunState(BEFORE, 0, 0, (0, 0), engine.state.scalars(), {}, {}, "", {}, {}, {})
            saver.save(BEFORE, state.text(), rank_state={})
            # Training goes on while the part is written: what was copied must not change.
            after = _steps(engine, start_step=BEFORE, steps=AFTER)
            outcome = saver.settle(wait=True)
        assert outcome is not None
        assert not outcome.has_failed, outcome
        return {"before": before, "after": after, "weights": _weights(engine)}


def _restore(source: str, layout: Layout, world: World, device: str, job: dict[str, Any]) -> dict[str, Any]:
    with _engine(layout, world, device, job, loads_weights=False) as engine:
        place = _place(Path(job["folder"]) / source, world)
        found = newest_checkpoint(place, place.path)
        assert found is not None
        restore_engine(engine, replace(place), found)
        return {"after": _steps(engine, start_step=BEFORE, steps=AFTER), "weights": _weights(engine)}


if __name__ == "__main__":
    main()
    exit_process()
