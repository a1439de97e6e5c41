"""Started as `torchrun --nproc-per-node 2 blocked_worker.py FOLDER`: how long a save blocks training, ours and
DeepSpeed's, in one run.
"""

import json
import os
import shutil
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist
from transformers import AutoConfig

from ds_finetune.checkpoint.folder import open_checkpoint_folder
from ds_finetune.checkpoint.part_storage import num_weights
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.saver import Saver
from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.families.configs import DENSE
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.system.world import World
from tests.checkpoint.layouts import LR, batches
from tests.planning import model_of

DEEP = DENSE | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
ROUNDS = 4


def main() -> None:
    """Print seconds of each round, by stage."""
    folder, found = Path(sys.argv[1]), {}
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        if world.rank == 0:
            AutoConfig.for_model("llama", **DEEP).save_pretrained(folder / "model")
        dist.barrier()
        for stage in (1, 2, 3):
            tree = run_tree(Cell("llama", stage, 1, packing=False), folder / "model", folder, dp=world.world_size)
            tree["model"] = {"path": str(folder / "model"), "weights": "random"}
            tree["train"] |= {"micro_batch_size": 1, "global_batch_size": world.world_size}
            config = RunConfig.model_validate(tree)
            plan = make_plan(RunSettings.of(config), world=world, device=device)
            with start_engine(plan, model_of(config)) as engine:
                found[f"stage {stage}"] = _contest(engine, folder / str(stage))
    if world.rank == 0:
        sys.stdout.write(f"FOUND {json.dumps(found)}\n")


def _contest(engine: Engine, folder: Path) -> dict[str, Any]:
    engine.step(next(iter(batches(engine, start_step=0, steps=1))), lr=LR)
    place = open_checkpoint_folder(folder / "ours", rank=engine.plan.world.rank, node_local=False)
    saver = Saver(engine.state.groups, place, True, {})
    state = RunState(1, 0, 0, (0, 0), engine.state.scalars(), {}, {}, "", {}, {}, {}).text()
    ours, whole, theirs = [], [], []
    with closing(saver):
        saver.start(
            int(num_weights(engine.state.groups(), portion=place.portion) * engine.plan.checkpoint_bytes_per_parameter)
        )
        for number in range(ROUNDS):
            dist.barrier()
            began = time.monotonic()
            ours.append(saver.save(number + 1, state, rank_state={}))
            outcome = saver.settle(wait=True)
            assert outcome is not None
            assert not outcome.has_failed, outcome.errors
            whole.append(time.monotonic() - began)
            dist.barrier()
            began = time.monotonic()
            engine._ds.save_checkpoint(str(folder / "theirs"), tag=f"step{number}")
            theirs.append(time.monotonic() - began)
            dist.barrier()
            if engine.is_rank_zero:
                shutil.rmtree(folder / "theirs")
    num_bytes = sum(path.stat().st_size for path in place.path.glob("step-000001/part-*"))
    dist.barrier()
    if engine.is_rank_zero:
        shutil.rmtree(folder)
    return {"bytes": num_bytes, "ours": ours, "until complete": whole, "theirs": theirs}


if __name__ == "__main__":
    main()
    exit_process()
