"""Started by the tests as `torchrun --nproc-per-node 2 reduction_worker.py MODEL OUT.json`: how far the gradient of a
step in bf16 is from the sum of the gradients of all forwards.
"""

import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.engine.state.full_tensors import named_parameters
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.reference.selftest.compare import first_moments, whole_batch
from ds_finetune.reference.selftest.reference_loop import BETAS, LR
from ds_finetune.system.world import World
from tests.planning import model_of

FORWARDS = 4
LORA = {"rank": 4}


def main() -> None:
    """Take a step in each case; rank zero writes the distances and the bytes of the reduction."""
    folder = Path(sys.argv[1])
    world, device = World.from_environment(os.environ), choose_device()
    found: dict[str, Any] = {}
    with process_group(world, device):
        for stage, dtype, (name, offload, lora) in itertools.product(
            (2, 3),
            ("auto", "fp32"),
            (("whole", "none", None), ("offloaded", "optimizer", None), ("lora", "none", LORA)),
        ):
            cell = Cell("llama", stage, FORWARDS, packing=True, precision="bf16", offload=offload)
            tree = run_tree(cell, folder, folder, dp=world.world_size) | {"lora": lora}
            tree["train"]["reduction_dtype"] = dtype
            config = RunConfig.model_validate(tree)
            with start_engine(
                make_plan(RunSettings.of(config), world=world, device=device), model_of(config)
            ) as engine:
                found[f"{name}-{stage}-{dtype}"] = _step(engine)
            gc.freeze()
    if world.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))


def _step(engine: Engine) -> dict[str, float]:
    summed: dict[str, torch.Tensor] = {}

    def add(name: str, grad: torch.Tensor) -> None:
        summed[name] = summed.get(name, torch.zeros((), dtype=torch.float64)) + grad.detach().double()

    trained = [(name, param) for name, param in named_parameters(engine.lm) if param.requires_grad]
    for name, param in trained:
        param.register_hook(lambda grad, name=name: add(name, grad))
    result = engine.step(whole_batch(engine), lr=LR)
    given = {name: moment / (1 - BETAS[0]) for name, moment in first_moments(engine).items()}
    apart = whole = 0.0
    for name, _ in trained:
        wanted = summed[name]
        dist.all_reduce(wanted)
        # The loss is scaled by the ranks that DeepSpeed divides by.
        wanted /= engine.plan.zero_ranks
        apart += float((given[name].reshape(wanted.shape) - wanted).square().sum())
        whole += float(wanted.square().sum())
    assert result.communication is not None
    sent = result.communication.num_bytes
    return {"apart": (apart / whole) ** 0.5, "bytes": sent.get("reduce_scatter", 0) or sent["all_reduce"]}


if __name__ == "__main__":
    main()
    exit_process()
