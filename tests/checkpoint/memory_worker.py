"""Started by test_memory.py as `memory_worker.py FOLDER`: peak memory of saving, beyond what was there, as one JSON
line.
"""

import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from transformers import AutoConfig

from ds_finetune.checkpoint.folder import open_checkpoint_folder
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.saver import Saver
from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.families.configs import DENSE
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.system.world import World
from tests.checkpoint.layouts import LR, batches
from tests.planning import model_of

DEEP = DENSE | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16}


def resident(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Save once each way and print what it took."""
    folder = Path(sys.argv[1])
    AutoConfig.for_model("llama", **DEEP).save_pretrained(folder / "model")
    tree = run_tree(Cell("llama", 1, 1, packing=False), folder / "model", folder, dp=1)
    tree["model"] = {"path": str(folder / "model"), "weights": "random"}
    tree["train"] |= {"micro_batch_size": 1, "global_batch_size": 1}
    world, device = World.from_environment(os.environ), choose_device()
    config = RunConfig.model_validate(tree)
    plan = make_plan(RunSettings.of(config), world=world, device=device)
    found = {}
    with process_group(world, device), start_engine(plan, model_of(config)) as engine:
        engine.step(next(iter(batches(engine, start_step=0, steps=1))), lr=LR)
        for is_asynchronous in (False, True):
            place = open_checkpoint_folder(folder / f"asynchronous-{is_asynchronous}", rank=0, node_local=False)
            saver = Saver(engine.state.groups, place, is_asynchronous, {})
            with closing(saver):
                saver.start(found.get("bytes", 0))
                while is_asynchronous and saver._process.is_busy:
                    saver._process.errors()
                state = RunState(1, 0, 0, (0, 0), engine.state.scalars(), {}, {}, "", {}, {}, {}).text()
                Path("/proc/self/clear_refs").write_text("5")
                before = resident("VmRSS")
                blocked = saver.save(1, state, rank_state={})
                began = time.monotonic()
                outcome = saver.settle(wait=True)
                assert outcome is not None
                assert not outcome.has_failed, outcome.errors
                found[str(is_asynchronous)] = {
                    "extra": resident("VmHWM") - before,
                    "blocked": blocked,
                    "rest": time.monotonic() - began,
                }
            found["bytes"] = sum(path.stat().st_size for path in place.path.rglob("part-*"))
        found["largest"] = max(param.numel() for param in engine.lm.parameters()) * 4
    sys.stdout.write(f"FOUND {json.dumps(found)}\n")


if __name__ == "__main__":
    main()
    exit_process()
