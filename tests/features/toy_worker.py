"""Started by the test as `torchrun --nproc-per-node 2 toy_worker.py FOLDER`: two steps with the toy feature."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoConfig

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.features.table import register_feature
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest import compare
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell, run_tree
from ds_finetune.reference.selftest.compare import whole_batch
from ds_finetune.reference.selftest.reference_loop import LR
from ds_finetune.system.world import World
from tests.features.toy_feature import SETTINGS, ToyFeature
from tests.planning import model_of


def main() -> None:
    """Let rank zero write losses and norms of the steps."""
    folder, (world, device) = Path(sys.argv[1]), (World.from_environment(os.environ), choose_device())
    register_feature(ToyFeature)
    with process_group(world, device):
        if world.rank == 0:
            compare.write_model(AutoConfig.for_model(**TINY_MODELS["deepseek_v3"]), folder / "model")
        torch.distributed.barrier()
        tree = run_tree(Cell("deepseek_v3", 2, 1, packing=False), folder / "model", folder / "out", dp=2)
        config = RunConfig.model_validate(tree | {"features": {"toy": SETTINGS}})
        plan = make_plan(RunSettings.of(config), world=world, device=device)
        with start_engine(plan, model_of(config)) as engine:
            steps = [engine.step(whole_batch(engine), lr=LR) for _ in range(2)]
    if world.rank == 0:
        found = [(step.loss, step.metrics["toy_loss"], step.grad_norm) for step in steps]
        (folder / "found.json").write_text(json.dumps({"steps": found, "limit": plan.train.max_grad_norm}))


if __name__ == "__main__":
    main()
    exit_process()
