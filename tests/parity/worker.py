"""Run many cells inside one launched world: one optimizer step each, gradients read back from Adam's first moment.

Started by the tests as `torchrun --nproc-per-node N worker.py MODELS_DIR OUT_DIR CELLS.json`.
"""

import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ds_finetune.config import RunConfig
from ds_finetune.data.batches import BatchPlan, training_batches
from ds_finetune.engine.core import Engine
from ds_finetune.engine.processes import choose_device, everyones, process_group
from ds_finetune.engine.start import start_engine
from ds_finetune.model.build import read_hf_config
from ds_finetune.plan.layout import Plan, make_plan
from ds_finetune.world import World

sys.path.insert(0, str(Path(__file__).parent))
from cells import ROW_LEN, Cell, rows, run_tree

STEPS = 3
LR = 1e-3


def main() -> None:
    """Run every cell and let rank zero write what came of it."""
    models, out, cells = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    world, device = World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for number, cell in enumerate(Cell(**tree) for tree in cells):
            config = RunConfig.model_validate(run_tree(cell, models / cell.family, out, dp=world.world_size // cell.sharing))
            found = _run(make_plan(config, world=world, device=device))
            if world.rank == 0:
                torch.save(found, out / f"{cell.name}-world={world.world_size}.pt")
            if number == 0:
                # What was imported is looked through no more: ZeRO-3 collects garbage at each start, 0.7 s of a cell of 1.7.
                gc.freeze()


def _run(plan: Plan) -> dict[str, Any]:
    with start_engine(plan, read_hf_config(plan.config.model.path)) as engine:
        return _three_steps(engine, plan)


def _three_steps(engine: Engine, plan: Plan) -> dict[str, Any]:
    config = plan.config
    shares = BatchPlan(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        rank=plan.mesh.place("dp"),
        dp=plan.dp,
        seed=0,
        shuffle=False,
        pad_token_id=0,
        row_len=ROW_LEN if config.data.packing else None,
        multiple=plan.mesh.sp,
    )
    every = rows(config.data.packing)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        batch = next(iter(training_batches(every, shares, start_step=0, total_rows=len(every))))
        result = engine.step(batch, lr=LR)
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
        if step == 0 and config.optim.name == "AdamW" and config.train.precision == "fp32":
            found["gradients"] = _gradients(engine)
    found["weights"] = {name: tensor.clone() for name, tensor in engine.tensors() if tensor is not None}
    return found


def _gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Gradient of the first step by parameter name: Adam's first moment is then (1 - beta1) times it."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if engine.plan.zero_stage in (1, 2):
        # DeepSpeed 0.19.8 links the states after the first group's step, when the others have none yet (zero/stage_1_and_2.py:2987).
        engine._ds.optimizer._hp_optimizer_states_linked = False
        engine._ds.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, param in engine._ds.module.named_parameters():
        moment = safe_get_full_optimizer_state(param, "exp_avg") if engine.plan.zero_stage else engine._ds.optimizer.state[param]["exp_avg"]
        whole = engine.joined(name.removeprefix("lm."), moment.detach().float())
        found[name.removeprefix("lm.")] = whole.clone().cpu() / 0.1
    mesh = engine.plan.mesh
    # Of the stages' first ranks; a weight on both ends of a pipeline has to have the same gradient there.
    stages = everyones(found if mesh.rank == mesh.leader else {}) if mesh.pp > 1 else [found]
    for earlier, later in itertools.combinations(stages, 2):
        assert all(torch.equal(earlier[name], later[name]) for name in earlier.keys() & later.keys())
    return {name: grad for stage in stages for name, grad in stage.items()}


if __name__ == "__main__":
    main()
