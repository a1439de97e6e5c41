"""Started by the tests as `torchrun --nproc-per-node 2 communication_worker.py MODELS_DIR OUT.json`: what the
collectives of a step are in each layout.
"""

import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.reference.selftest.compare import take_steps
from ds_finetune.system.world import World
from tests.planning import model_of

CELLS = [
    *(Cell("llama", stage, 2, packing=True) for stage in (0, 1, 2, 3)),
    *(Cell("llama", 1, 2, packing=True, **{axis: 2}) for axis in ("tp", "sp", "pp")),
    Cell("deepseek_v3", 1, 2, packing=True, ep=2),
]
SELECTIVE = Cell("deepseek_v3", 1, 2, packing=True, checkpointing=True, is_selective=True, ep=2)


def main() -> None:
    """Take two steps in each layout; rank zero writes what every rank's second step was."""
    folder = Path(sys.argv[1])
    world, device = World.from_environment(os.environ), choose_device()
    found: dict[str, Any] = {}

    def take(name: str, cell: Cell, tree: dict[str, Any]) -> None:
        config = RunConfig.model_validate(tree)
        with start_engine(make_plan(RunSettings.of(config), world=world, device=device), model_of(config)) as engine:
            if cell.ep > 1:
                _send_all_away(engine, world.rank)
            found[name] = all_gather_object(_second_step(engine))
        gc.freeze()

    with process_group(world, device):
        for cell in (*CELLS, SELECTIVE):
            tree = run_tree(cell, folder / cell.family, folder, dp=world.world_size // cell.sharing)
            take("selective" if cell is SELECTIVE else f"{cell.layout}, ZeRO-{cell.stage}", cell, tree)
        for checkpointing, overlaps in itertools.product((False, True), (True, False)):
            cell = Cell("deepseek_v3", 1, 2, packing=True, ep=2, checkpointing=checkpointing)
            config = RunConfig.model_validate(run_tree(cell, folder / cell.family, folder, dp=world.world_size))
            with start_engine(
                make_plan(RunSettings.of(config), world=world, device=device), model_of(config)
            ) as engine:
                name = "checkpointed" if checkpointing else "whole"
                found[f"{name}, {'overlapped' if overlaps else 'apart'}"] = _overlapped(engine, overlaps=overlaps)
    if world.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))


def _second_step(engine: Engine) -> dict[str, Any]:
    """ZeRO-3 learns in the first step which parameters it gathers together."""
    results = []
    plain = engine.step

    def keep(*args: Any, **kwargs: Any) -> Any:
        results.append(plain(*args, **kwargs))
        return results[-1]

    engine.step = keep  # type: ignore[method-assign]
    for _ in take_steps(engine, 2):
        pass
    made = results[-1].communication
    return {
        "bytes": made.num_bytes,
        "seconds": made.seconds,
        "metrics": made.metrics(step_seconds=1.0),
        "supervised": results[-1].num_supervised_tokens,
    }


def _overlapped(engine: Engine, *, overlaps: bool) -> dict[str, Any]:
    """Losses and norms of three steps, and in which order the modules of the last layer were called at last."""
    calls: list[str] = []
    mlp = engine.lm.get_submodule("model.layers.1.mlp")
    if not overlaps:
        mlp.experts.compute_meanwhile = None
    for name in ("experts", "shared_experts.down_proj"):
        mlp.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    *_, steps = take_steps(engine, 3)
    return {"losses": steps.losses, "norms": steps.norms, "calls": calls[-2:]}


def _send_all_away(engine: Engine, rank: int) -> None:
    """Each rank's router chooses experts of the other rank alone."""
    for name, buffer in engine.lm.named_buffers():
        if name.endswith("e_score_correction_bias"):
            half = len(buffer) // 2
            buffer[(1 - rank) * half : (2 - rank) * half] += 10.0


if __name__ == "__main__":
    main()
    exit_process()
