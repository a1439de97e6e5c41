"""Started by the tests as `torchrun worker.py MODELS OUT.json LAYOUT...`: the answers that every layout samples."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine import answer_weights
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.sampling.answers import SamplingLimits
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.system.world import World
from tests.engine.sampling.plain import SEED, prompts_of
from tests.planning import model_of

LENGTHS, GROUP = (9, 1, 17, 9, 2), 3
LIMITS = SamplingLimits(8, (1, 2, 4, 11), 93)
LAYOUTS = {
    "zero0": Cell("deepseek_v3", 0, 1, packing=False),
    "zero1": Cell("llama", 1, 1, packing=False),
    "zero2": Cell("deepseek_v3", 2, 1, packing=False, checkpointing=True),
    "zero3": Cell("deepseek_v3", 3, 1, packing=False),
    "zero3-layers": Cell("qwen3_moe", 3, 1, packing=False),
    "zero3-offload": Cell("llama", 3, 1, packing=False, offload="param"),
    "lora": Cell("deepseek_v3", 3, 1, packing=False, has_lora=True),
    "tp": Cell("llama", 1, 1, packing=False, tp=2),
    "tp-zero3": Cell("deepseek_v3", 3, 1, packing=False, tp=2),
    "sp": Cell("llama", 3, 1, packing=False, sp=2),
    "ep": Cell("deepseek_v3", 1, 1, packing=False, ep=2),
    "pp": Cell("llama", 1, 1, packing=False, pp=2),
}


def main() -> None:
    """Sample in every layout; rank zero writes what all ranks have."""
    world, device = World.from_environment(os.environ), choose_device()
    models, out, *names = sys.argv[1:]
    found: dict[str, Any] = {}
    with process_group(world, device):
        for name in names:
            cell = LAYOUTS[name]
            tree = run_tree(cell, Path(models) / cell.family, Path(out).parent, dp=world.world_size // cell.sharing)
            config = RunConfig.model_validate(tree)
            # Nothing fits into no memory, so that each layer is gathered for each token.
            answer_weights.WEIGHTS_SHARE = 0.0 if name == "zero3-layers" else 0.5
            plan = make_plan(RunSettings.of(config), world=world, device=device)
            with start_engine(plan, model_of(config)) as engine:
                found[name] = _sampled(engine)
    if world.rank == 0:
        Path(out).write_text(json.dumps(found))


def _sampled(engine: Engine) -> dict[str, Any]:
    """Answers in batches as memory allows, and of at most four rows; the same on all ranks."""
    engine._ds.train()
    prompts = prompts_of(LENGTHS)
    every = []
    for rows in (None, 4):
        answers = engine.sample(prompts, group_size=GROUP, limits=LIMITS, seed=SEED, batch_rows=rows)
        assert answers is not None
        every.append([[(a.ids.tolist(), a.log_probs.tolist(), a.finish) for a in group] for group in answers])
    assert engine._ds.training
    assert all(part == every for part in all_gather_object(every))
    ended = engine.sample(prompts, group_size=1, limits=LIMITS, seed=SEED, is_over=lambda: True)
    assert ended is None
    return {"auto": every[0], "small": every[1]}


if __name__ == "__main__":
    main()
    exit_process()
