"""Take the steps of each cell as it is, with layer inputs on the host, and with tiled MLPs, in one launched world.

Started by the tests as `torchrun --nproc-per-node N activation_worker.py MODELS_DIR OUT_DIR CELLS.json`; a cell is the
tree of a `Cell` and whether adapters are trained.
"""

import gc
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from deepspeed.utils import z3_leaf_module
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.default_group import process_group
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.model.activation_offload import LayerInputOffload
from ds_finetune.model.model_plan import ModelPlan
from ds_finetune.model.tiled_mlp import tiled_modules
from ds_finetune.plan.activations import mlp_tiles
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.selftest.cells import Cell, run_tree
from ds_finetune.selftest.steps import take_steps
from ds_finetune.world import World
from tests.lora_twin import lora_tree
from tests.planning import model_of

STEPS = 2


def main() -> None:
    """Run every cell three times; rank zero writes the results."""
    models, out, cells = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for number, (tree, has_adapters) in enumerate(cells):
            cell = Cell(**tree)
            config = RunConfig.model_validate(
                run_tree(cell, models / cell.family, out, dp=world.world_size // cell.sharing)
                | ({"lora": lora_tree(cell.family)} if has_adapters else {})
            )
            plan, model = make_plan(config, world=world, device=device), model_of(config)
            tiles = mlp_tiles(model.hf_config.to_dict())
            assert tiles > 1, model.hf_config
            found = {
                "plain": _run(plan, model),
                # On a CPU the run file's key is refused, and tensors are copied within its memory.
                "offloaded": _run(replace(plan, activation_offload=True), model),
                "tiled": _run(plan, replace(model, mlp_tiles=tiles)),
            }
            if world.rank == 0:
                torch.save(found, out / f"{cell.name}-{has_adapters}.pt")
            if number == 0:
                # What was imported is looked through no more: ZeRO-3 collects garbage at each start.
                gc.freeze()


def _run(plan: Plan, model: ModelPlan) -> dict[str, Any]:
    with start_engine(plan, model) as engine:
        *_, steps = take_steps(engine, STEPS)
        weights = {name: tensor.clone() for name, tensor in engine.tensors() if tensor is not None}
        weights |= {name: tensor.clone() for name, tensor in engine.adapters() if tensor is not None}
        if plan.activation_offload:
            _check_offload(engine.lm)
        if model.mlp_tiles > 1 and plan.zero_stage == 3:
            _check_one_gather(engine.lm)
        return asdict(steps) | {"weights": weights}


def _check_offload(lm: torch.nn.Module) -> None:
    """Every input that left, but those of forwards without a backward, came back."""
    layers: list[Any] = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    (offload,) = {layer._gradient_checkpointing_func.func.__self__ for layer in layers}
    assert isinstance(offload, LayerInputOffload)
    assert offload.num_stored == offload.num_fetched, (offload.num_stored, offload.num_fetched)
    assert offload.num_stored or len(layers) == 1


def _check_one_gather(lm: torch.nn.Module) -> None:
    """DeepSpeed gathers the weights of a tiled MLP at once: modules within it have no hooks of their own, and it has,
    or is itself in a block that DeepSpeed gathers at once (those of Mixtral and Qwen, zero/leaf_module_config.py:12).

    It numbers the modules that it hooks (DeepSpeed 0.19.8, zero/parameter_offload.py:345).
    """
    tiled = tiled_modules(lm)
    blocks = [module for module in lm.modules() if z3_leaf_module(module) and module not in tiled]
    in_blocks = {module for block in blocks for module in block.modules() if module is not block}
    assert all(hasattr(mlp, "ds_id") != (mlp in in_blocks) for mlp in tiled)
    assert not any(hasattr(module, "ds_id") for mlp in tiled for module in mlp.modules() if module is not mlp)


if __name__ == "__main__":
    main()
    exit_process()
