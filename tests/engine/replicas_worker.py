"""Started by the tests as `torchrun --nproc-per-node 2 replicas_worker.py FOLDER`: copies of weights after two steps,
and with the next number of fp32 in one element on rank 1; and the persistent weights of ZeRO-3.

As `torchrun replicas_worker.py RUN.yaml WEIGHT` it is the command `train`, in which rank 1 gets such an element of a
weight after the second step.
"""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ds_finetune.cli.main import exit_process, run_and_exit
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.patches.deepspeed_gathering import check_order_of_gathers
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.errors import ConfigError, RunError
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest import compare
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell, run_tree
from ds_finetune.system.world import World
from tests.planning import model_of

MODELS = {"deepseek_v3": TINY_MODELS["deepseek_v3"], "tied": TINY_MODELS["qwen2"] | {"tie_word_embeddings": True}}
NORM, BIAS, EMBEDDING = (
    "model.norm.weight",
    "model.layers.1.mlp.gate.e_score_correction_bias",
    "model.embed_tokens.weight",
)
CASES: dict[str, tuple[str, str, Cell]] = {
    name: (model, weight, Cell("deepseek_v3", stage, 1, packing=False, precision=precision, **sizes))
    for name, model, weight, stage, precision, sizes in (
        ("tp-0", "deepseek_v3", NORM, 0, "fp32", {"tp": 2}),
        ("tp-1", "deepseek_v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 1, "bf16", {"tp": 2}),
        ("tp-3", "deepseek_v3", "model.layers.1.mlp.gate.weight", 3, "bf16", {"tp": 2}),
        ("dp-0", "deepseek_v3", NORM, 0, "fp32", {}),
        ("dp-2", "deepseek_v3", BIAS, 2, "fp32", {"balances": True}),
        ("ep-0", "deepseek_v3", NORM, 0, "fp32", {"ep": 2}),
        ("sp-0", "deepseek_v3", NORM, 0, "fp32", {"sp": 2}),
        ("pp-0", "tied", EMBEDDING, 0, "fp32", {"pp": 2}),
        ("pp-1", "tied", EMBEDDING, 1, "bf16", {"pp": 2}),
    )
}
THRESHOLDS = ((15, 100), (16, 100), (100, 15), (100, 16), (1, 1))
"""Pairs of `stage3_param_persistence_threshold` and `stage3_model_persistence_threshold`."""


def main() -> None:
    """Let each rank write what it found."""
    folder, (world, device) = Path(sys.argv[1]), (World.from_environment(os.environ), choose_device())
    found: dict[str, Any] = {}
    with process_group(world, device):
        for model, config in MODELS.items() if world.rank == 0 else ():
            compare.write_model(AutoConfig.for_model(**config), folder / model)
        torch.distributed.barrier()
        for name, (model, weight, cell) in CASES.items():
            config = RunConfig.model_validate(run_tree(cell, folder / model, folder, dp=2 // cell.sharing))
            plan = make_plan(RunSettings.of(config), world=world, device=device)
            with start_engine(plan, model_of(config)) as engine:
                list(compare.take_steps(engine, 2))
                equal = error_of(engine)
                change(engine, weight, rank=1)
                found[name] = [equal, error_of(engine)]
                if name == "tp-3":
                    found["persistent"] = refused_thresholds(engine)
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


def error_of(engine: Engine) -> str:
    """The message about copies that differ; empty where they are equal."""
    try:
        engine.check_replicas()
    except RunError as error:
        return error.message
    return ""


def change(engine: Engine, name: str, *, rank: int) -> None:
    """Element 3 of a weight's fp32 values, or of a buffer, is one unit in the last place larger on a rank."""
    if engine.plan.world.rank != rank:
        return
    tensors = {part.name: (master.flat, part.offset) for master in engine.state._masters for part in master.parts}
    tensor, offset = tensors.get(name) or (engine.lm.get_buffer(name), 0)
    flat = tensor.detach().view(-1)
    flat[offset + 3] = torch.nextafter(flat[offset + 3], torch.tensor(math.inf))


def refused_thresholds(engine: Engine) -> list[str]:
    """What is refused, with the weights that DeepSpeed itself marks as persistent, were this a run on two GPUs."""
    zero = engine.plan.zero | {"overlap_comm": True}
    tree = engine.plan.deepspeed_config | {"zero_optimization": zero}
    plan = replace(engine.plan, device="cuda", mesh=replace(engine.plan.mesh, dp=2), deepspeed_config=tree)
    optimizer, messages = engine._ds.optimizer, []
    offload = optimizer.parameter_offload
    for offload.param_numel_persistence_threshold, offload.model_persistence_threshold in THRESHOLDS:
        offload.persistent_parameters = offload.mark_persistent_parameters(
            offload.param_numel_persistence_threshold, offload.model_persistence_threshold
        )
        try:
            check_order_of_gathers(optimizer, engine._ds.module, plan)
            messages.append("")
        except ConfigError as error:
            messages.append(str(error))
    return messages


def train_with_change() -> None:
    """Train, with another element on rank 1 from the second step on."""
    steps, step = [], Engine.step

    def changed(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        result = step(engine, *args, **kwargs)
        steps.append(result)
        if len(steps) == 2:
            change(engine, sys.argv[2], rank=1)
        return result

    Engine.step = changed  # type: ignore[method-assign]
    run_and_exit(["train", sys.argv[1]])


if __name__ == "__main__":
    if sys.argv[1].endswith(".yaml"):
        train_with_change()
    main()
    exit_process()
