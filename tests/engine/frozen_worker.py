"""Started by the tests as `torchrun worker.py FOLDER`: parameters that are not trained, under weight decay, saved and
resumed: those that no loss reaches, and routers, whose biases are moved.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest import compare
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell, run_tree
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import freeze_parameters
from tests.planning import model_of

MODELS = {
    "indexed": TINY_MODELS["deepseek_v32"] | {"first_k_dense_replace": 2},
    "deep": TINY_MODELS["deepseek_v3_deep"],
}
ROUTER = {"train": False, "bias_update": 0.01}
CASES: dict[str, tuple[str, Cell]] = {
    name: (model, Cell("", stage, 1, packing=False, precision=precision, weight_decay=0.5, **sizes))
    for name, model, stage, precision, sizes in (
        ("0-bf16", "indexed", 0, "bf16", {}),
        ("2-fp32", "indexed", 2, "fp32", {}),
        ("3-bf16", "indexed", 3, "bf16", {}),
        ("routers-3-bf16", "deep", 3, "bf16", {}),
        ("routers-3-fp32-tp", "deep", 3, "fp32", {"tp": 2}),
        ("routers-1-fp32-pp", "deep", 1, "fp32", {"pp": 2}),
    )
}


def main() -> None:
    """Train each case and let rank zero write what became of the parameters."""
    folder, (world, device) = Path(sys.argv[1]), (World.from_environment(os.environ), choose_device())
    found = {}
    with process_group(world, device):
        for model, config in MODELS.items() if world.rank == 0 else ():
            compare.write_model(AutoConfig.for_model(**config), folder / model)
        torch.distributed.barrier()
        for name, (model, cell) in CASES.items():
            tree = run_tree(cell, folder / model, folder / name, dp=world.world_size // cell.sharing)
            config = RunConfig.model_validate(tree | {"router": ROUTER if model == "deep" else None})
            with engine_of(config, world, device) as engine:
                before = weights_of(engine)
                compare._steps_with_checkpoint(engine, folder / name, 3)
                trained, notes = weights_of(engine), engine.plan.notes
            with engine_of(config, world, device, loads_weights=False) as engine:
                compare._steps_after_resume(engine, folder / name, 2)
                resumed = weights_of(engine)
            if not found:
                # ZeRO-3 collects garbage at each start; this excludes everything imported so far.
                gc.freeze()
            found[name] = {"notes": notes, **_compared(before, trained, resumed)}
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


@contextmanager
def engine_of(config: RunConfig, world: World, device: str, *, loads_weights: bool = True) -> Iterator[Engine]:
    """The engine of a run file, with what is frozen."""
    model = model_of(config)
    plan = freeze_parameters(make_plan(RunSettings.of(config), world=world, device=device), model)
    with start_engine(plan, model, loads_weights=loads_weights) as engine:
        yield engine


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Whole tensors by name on rank zero."""
    return {name: tensor.clone() for name, tensor in engine.tensors() if tensor is not None}


def _compared(before: dict[str, torch.Tensor], *after: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Names that differ from before training in some of `after`, and whether these agree."""
    changed = {name for name in before for one in after if not torch.equal(before[name], one[name])}
    first, second = after
    return {
        "changed": sorted(changed),
        "resumed": all(torch.allclose(first[n], second[n], atol=1e-6) for n in before),
        "biases": all(torch.equal(first[n], second[n]) for n in before if n.endswith("bias")),
    }


if __name__ == "__main__":
    main()
    exit_process()
