"""Started by the tests as `torchrun --nproc-per-node 2 communication_worker.py MODELS_DIR OUT.json [more]`: what the
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
MORE = [
    Cell("deepseek_v3", 1, 2, packing=True, checkpointing=True, tp=2),
    Cell("deepseek_v3", 2, 2, packing=True, checkpointing=True, sp=2),
    Cell("deepseek_v3", 2, 2, packing=True, checkpointing=True, ep=2, reduces_once=True),
    Cell("deepseek_v3", 1, 2, packing=True, checkpointing=True, is_selective=True, ep=2),
    Cell("llama", 3, 2, packing=True, precision="bf16", reduces_once=True),
]
"""Whose bytes are compared with arithmetic alone (ds_finetune/plan/estimate/traffic.py)."""
_NOT_KEPT = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
WITH_OPTIONS: dict[str, tuple[Cell, dict[str, Any]]] = {
    "weights gathered again": (Cell("llama", 3, 2, packing=True), _NOT_KEPT),
    "LoRA, ZeRO-3": (Cell("llama", 3, 2, packing=True, has_lora=True), {}),
    "LoRA, tp 2": (Cell("llama", 1, 2, packing=True, has_lora=True, tp=2), {}),
    "vpp 2": (Cell("llama_deep", 1, 2, packing=True, pp=2, vpp=2), {}),
}
"""The same, with what is added to `zero_optimization`, by name."""
MORE_WITH_OPTIONS: dict[str, tuple[Cell, dict[str, Any]]] = {
    "LoRA": (Cell("llama", 1, 2, packing=True, has_lora=True), {}),
    "LoRA, latent attention, tp 2": (Cell("deepseek_v3", 1, 2, packing=True, has_lora=True, tp=2), {}),
    "LoRA, sp 2": (Cell("llama", 1, 2, packing=True, has_lora=True, sp=2), {}),
    "LoRA, ep 2": (Cell("deepseek_v3", 1, 2, packing=True, has_lora=True, ep=2), {}),
    "tied, pp 2": (Cell("qwen2", 1, 2, packing=True, pp=2), {}),
    "tied, LoRA, pp 2": (Cell("qwen2", 1, 2, packing=True, has_lora=True, pp=2), {}),
}
"""Those of slow tests, in a launch of their own."""


def options_tree(cell: Cell, options: dict[str, Any], model: Path, out: Path, *, ranks: int) -> dict[str, Any]:
    """The run file of a cell with options."""
    tree = run_tree(cell, model, out, dp=ranks // cell.sharing)
    tree["deepspeed"]["zero_optimization"] |= options
    return tree


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

    is_more = sys.argv[3:] == ["more"]
    with process_group(world, device):
        for cell in () if is_more else (*CELLS, *MORE):
            tree = run_tree(cell, folder / cell.family, folder, dp=world.world_size // cell.sharing)
            take(cell.name if cell in MORE else f"{cell.layout}, ZeRO-{cell.stage}", cell, tree)
        for name, (cell, options) in (MORE_WITH_OPTIONS if is_more else WITH_OPTIONS).items():
            take(name, cell, options_tree(cell, options, folder / cell.family, folder, ranks=world.world_size))
        for checkpointing, overlaps in () if is_more else itertools.product((False, True), (True, False)):
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
