"""What a step costs at each layout: seconds, and bytes a rank sends. Started as `torchrun --nproc-per-node 2
cost_worker.py OUT.json`.

Bytes are those of the metrics `comm/...` (docs/reference/metrics.md).
"""

import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.small_v3 import SMALL_V3
from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import BatchPlan, training_batches
from ds_finetune.data.prepared_rows import Row
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.planning import model_of

EVEN = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
}
"""A model whose layers are nearly all of its work, so that two stages of four take as long."""
TOKENS, ROWS, STEPS = 512, 4, 5
LAYOUTS: dict[str, dict[str, int]] = {
    "dp 2": {},
    "tp 2": {"tp": 2},
    "sp 2": {"sp": 2},
    "ep 2": {"ep": 2},
    "pp 2": {"pp": 2},
}
BUBBLE = (1, 2, 4, 8)
"""Forwards of a step for which the waiting of a pipeline is measured."""


def main() -> None:
    """Every layout at ZeRO 1, 2 and 3, by turns, on the same rows; and the whole model or a pipeline of it with 1 to 8
    forwards.
    """
    world, device = World.from_environment(os.environ), choose_device()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, process_group(world, device):
        AutoConfig.for_model("deepseek_v3", **SMALL_V3).save_pretrained(name)
        for stage, (layout, parallel) in itertools.product((1, 2, 3) if world.world_size > 1 else (), LAYOUTS.items()):
            if layout != "pp 2" or stage == 1:
                found[f"{layout}, ZeRO-{stage}"] = _measured(name, stage, parallel, world, device)
        AutoConfig.for_model("llama", **EVEN).save_pretrained(name)
        for forwards in BUBBLE:
            found[f"{forwards} forwards"] = _measured(
                name,
                1,
                {"pp": world.world_size, "pp_layers": [4, 4]} if world.world_size > 1 else {},
                world,
                device,
                forwards,
            )
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


def _measured(
    model: str, stage: int, parallel: dict[str, Any], world: World, device: str, forwards: int = 0
) -> dict[str, Any]:
    """Median seconds of a step and bytes sent, two forwards of two rows a rank; given `forwards`, as many of one row
    each.
    """
    sharing = parallel.get("tp", 1) * parallel.get("sp", 1) * parallel.get("pp", 1)
    rows, micro = (forwards, 1) if forwards else (ROWS, sharing)
    train = {
        "for": "9 steps",
        "global_batch_size": rows,
        "micro_batch_size": micro,
        "max_seq_len": TOKENS,
        "precision": "fp32" if forwards else "bf16",
    }
    tree = {
        "model": {"path": model, "weights": "random"},
        "data": {"train": "none.jsonl"},
        "parallel": parallel,
        "output_dir": model,
    }
    tree |= {
        "train": train | {"activation_checkpointing": "none"},
        "deepspeed": {"zero_optimization": {"stage": stage}},
    }
    config = RunConfig.model_validate(tree)
    plan = make_plan(RunSettings.of(config), world=world, device=device)
    with start_engine(plan, model_of(config)) as engine:
        shares = BatchPlan(rows, micro, plan.mesh.coordinate("dp"), plan.dp, 0, False, 0, TOKENS)
        seconds = []
        for step, batch in enumerate(training_batches(_rows(), shares, start_step=0, total_rows=rows * (STEPS + 1))):
            began = time.perf_counter()
            made = engine.step(batch, lr=1e-3).communication
            seconds.append(time.perf_counter() - began)
            assert step <= STEPS
        return {"seconds": sorted(seconds[1:])[STEPS // 2], "bytes": dict(made.num_bytes) if made else {}}


def _rows() -> list[Row]:
    ids = torch.randint(3, EVEN["vocab_size"], (ROWS, TOKENS), generator=torch.Generator().manual_seed(0)).int().numpy()
    places = torch.arange(TOKENS).int().numpy()
    return [Row(input_ids=row, position_ids=places, labels=row, supervised=TOKENS) for row in ids]


if __name__ == "__main__":
    main()
    exit_process()
