"""Started by the tests as `torchrun --nproc-per-node 2 vocabulary_worker.py FOLDER`: grown models in every layout of
two ranks.

Rank zero writes the weights that each holds before its first step.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.model.build.skeleton import read_hf_config
from ds_finetune.model.weights.vocabulary import grow_vocabulary
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import plan_model

AFTER = 102
LAYOUTS: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("deepseek_v3", 0, {}),
    ("deepseek_v3", 1, {}),
    ("deepseek_v3", 2, {}),
    ("deepseek_v3", 3, {}),
    ("deepseek_v3", 3, {"tp": 2}),
    ("deepseek_v3", 3, {"sp": 2}),
    ("deepseek_v3", 1, {"ep": 2}),
    ("deepseek_v3", 1, {"pp": 2}),
    ("qwen2", 3, {}),
    ("qwen2", 1, {"tp": 2}),
    ("qwen2", 1, {"pp": 2}),
)
"""Family, ZeRO stage and sizes; the embedding of qwen2 is tied."""


def name_of(family: str, stage: int, parallel: dict[str, int]) -> str:
    """A name for files and test ids."""
    return "-".join([family, f"zero{stage}", *(f"{axis}{size}" for axis, size in parallel.items())])


def main() -> None:
    """Start every layout in one world."""
    folder, world, device = Path(sys.argv[1]), World.from_environment(os.environ), choose_device()
    with process_group(world, device):
        for family, stage, parallel in LAYOUTS:
            config = _config(folder / family, stage, parallel)
            plan = make_plan(RunSettings.of(config), world=world, device=device)
            hf_config = read_hf_config(config.model.path)
            grow_vocabulary(hf_config, AFTER)
            with start_engine(plan, plan_model(hf_config, RunSettings.of(config))) as engine:
                found = {name: tensor.clone() for name, tensor in engine.tensors() if tensor is not None}
            if world.rank == 0:
                torch.save(found, folder / f"{name_of(family, stage, parallel)}.pt")


def _config(model: Path, stage: int, parallel: dict[str, int]) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": str(model), "resize_vocabulary": True},
        "data": {"train": "none"},
        "output_dir": "none",
    }
    tree |= {
        "parallel": parallel,
        "deepspeed": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40}},
    }
    return RunConfig.model_validate(tree | {"train": {"precision": "fp32", "global_batch_size": 2, "max_seq_len": 64}})


if __name__ == "__main__":
    main()
    exit_process()
