"""Run many cells with adapters inside one launched world: a few optimizer steps each.

Started by the tests as `torchrun --nproc-per-node N lora_worker.py MODELS_DIR OUT_DIR CELLS.json [QUANTIZE]`.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.default_group import process_group
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.engine.whole_tensors import gather_zero3
from ds_finetune.model.four_bit import is_four_bit
from ds_finetune.model.model_plan import ModelPlan
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.selftest.cells import Cell, run_tree
from ds_finetune.selftest.reference_loop import BETAS
from ds_finetune.selftest.steps import first_moments, of_all_stages, take_steps
from ds_finetune.world import World
from tests.lora_twin import four_bit_tensors, lora_tree
from tests.planning import model_of

STEPS = 3


def main() -> None:
    """Run every cell and let rank zero write what came of it."""
    models, out, cells = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    quantised = {"quantize": sys.argv[4]} if sys.argv[4:] else {}
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for number, cell in enumerate(Cell(**tree) for tree in cells):
            tree = run_tree(cell, models / cell.family, out, dp=world.world_size // cell.sharing) | {
                "lora": lora_tree(cell.family) | quantised
            }
            config = RunConfig.model_validate(tree)
            found = _run(make_plan(config, world=world, device=device), model_of(config))
            if world.rank == 0:
                torch.save(found, out / f"{cell.name}-world={world.world_size}.pt")
            if number == 0:
                # What was imported is looked through no more: ZeRO-3 collects garbage at each start.
                gc.freeze()


def _run(plan: Plan, model: ModelPlan) -> dict[str, Any]:
    with start_engine(plan, model) as engine:
        moments: list[dict[str, torch.Tensor]] = []
        for found in take_steps(engine, STEPS):
            steps = found
            moments.append(of_all_stages(engine, first_moments(engine)) if plan.precision == "fp32" else {})
        return {
            "losses": steps.losses,
            "norms": steps.norms,
            "gradients": _gradients(moments),
            "frozen": _frozen(engine.tensors()),
            "four_bit": of_all_stages(engine, _four_bit(engine.lm)),
        }


def _gradients(moments: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Gradients of each step from Adam's first moments after them."""
    before = [{name: torch.zeros_like(moment) for name, moment in moments[0].items()}, *moments]
    return [
        {name: (m - BETAS[0] * old[name]) / (1 - BETAS[0]) for name, m in new.items()}
        for old, new in zip(before, moments, strict=False)
    ]


def _four_bit(lm: nn.Module) -> Any:
    """All that is kept of the weights in four bits; gathered one at a time where ZeRO-3 has them in parts."""
    found = {}
    for name, param in lm.named_parameters():
        if is_four_bit(param):
            assert not hasattr(param, "ds_tensor") or not param.numel(), f"{name} is whole between steps"
            with gather_zero3(param):
                found[name] = four_bit_tensors(param)
    return found


def _frozen(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors if tensor is not None}


if __name__ == "__main__":
    main()
    exit_process()
